"""The parts of ``compare.py``: the weights both sides get, what is measured, and the report."""
