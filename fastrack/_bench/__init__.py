"""Measure what sealed transfers cost, step by step."""
