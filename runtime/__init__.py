"""Plan + KernelSet + data -> trained adapter, ValidationReport."""
