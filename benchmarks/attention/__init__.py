"""Parts of benchmarks/linear_attention.py: workloads, implementations, measuring, pictures."""
