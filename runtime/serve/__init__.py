"""The HTTP server of `stepgraph serve`: OpenAI's API on starlette and uvicorn."""
