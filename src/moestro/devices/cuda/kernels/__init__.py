"""Kernels in Triton, written once over a weight format's decoder (``devices/cuda/formats.py``)."""
