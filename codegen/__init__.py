"""ModelAnalysis + Backend -> OperatorMap, KernelSet."""
