"""Inputs that somebody altered, made by the thousand: what reads them, how they are altered, and what must hold.

``make fuzz`` runs the targets under atheris; `test_fuzz_targets` feeds a few hundred inputs to each without it.
"""
