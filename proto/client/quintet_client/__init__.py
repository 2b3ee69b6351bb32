"""Client of Quintet's gRPC services.

with Client("localhost:50051") as client:
    for chunk in client.generate_stream("Once upon a time", max_new_tokens=64, timeout=30):
        print(chunk.text, end="")
"""

from quintet_client.aio import AsyncClient
from quintet_client.client import Client
from quintet_client.errors import FieldViolation, QuintetError
from quintet_client.options import GenerateOptions
from quintet_client.requests import ChatMessage, Prompt

__all__ = ["AsyncClient", "ChatMessage", "Client", "FieldViolation", "GenerateOptions", "Prompt", "QuintetError"]
