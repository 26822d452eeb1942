"""model folder -> ModelAnalysis."""
