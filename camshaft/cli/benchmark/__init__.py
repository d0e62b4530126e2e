"""What ``camshaft bench`` measures: workloads, running them, reports, comparisons."""
