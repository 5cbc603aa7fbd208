"""Prediction of how long stages and jobs take, from profiles of machines."""
