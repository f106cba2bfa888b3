"""Tables, figures and benchmarks, started as `python -m scripts.NAME` from the root."""
