"""The steps of ``benchmarks/gpu_session.sh`` that have no command of their own."""
