"""The suite for GPUs: checks, figures and a picture, by one command that needs no network. ``make gpu`` runs it."""
