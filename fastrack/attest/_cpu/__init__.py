"""Evidence of CPUs: AMD SEV-SNP and Intel TDX."""
