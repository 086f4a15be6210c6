"""Copy-engine pulls and stream-ordered flags between the GPUs of one node. Not yet run on GPUs."""
