"""Tables, figures and benchmarks, started as `python -m scripts.NAME` from the root."""
import importlib

importlib.import_module("support")       # before torch, see support/__init__.py
