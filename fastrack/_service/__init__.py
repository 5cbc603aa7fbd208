"""The service that brokers and desks are made of: its server, handlers and limits, and a database with a log.

All but the journal needs the extra ``fastrack-io[broker]``: starlette and uvicorn.
"""
