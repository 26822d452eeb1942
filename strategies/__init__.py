"""ModelAnalysis + Cluster + Job -> Plan."""
