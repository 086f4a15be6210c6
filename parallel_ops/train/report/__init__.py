"""Console lines, log files, plots and traces of a run."""
