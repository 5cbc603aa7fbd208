"""Measure the cost of sealed transfers, step by step."""
