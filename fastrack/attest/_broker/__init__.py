"""The owner's side of the exchange as a service: challenges, offers, grants, and a log of all decisions.

Needs the extra ``fastrack-io[broker]``: starlette and uvicorn.
"""
