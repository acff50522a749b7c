"""Requests, scheduling, running and sampling."""
