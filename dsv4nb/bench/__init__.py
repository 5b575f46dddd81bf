"""What is measured on this machine: `python -m dsv4nb.bench decode|overhead|gil`."""
