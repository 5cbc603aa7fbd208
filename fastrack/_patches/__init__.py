"""Functions of other libraries, replaced for the process: once each, for handlers that are taken back by themselves."""
