"""The rpcs by name, with the types that they take and give: what generated stubs do not tell a type checker."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from quintet_client.v1 import control_pb2, inference_pb2

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """One rpc. `name` is service/method within quintet.v1."""

    name: str
    request: type[Request]
    response: type[Response]

    @property
    def path(self) -> str:
        """As it stands in HTTP/2 headers."""
        return f"/quintet.v1.{self.name}"


GENERATE = Method("Inference/Generate", inference_pb2.GenerateRequest, inference_pb2.GenerateResponse)
GENERATE_STREAM = Method("Inference/GenerateStream", inference_pb2.GenerateRequest, inference_pb2.GenerateChunk)
TOKENIZE = Method("Inference/Tokenize", inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse)
DETOKENIZE = Method("Inference/Detokenize", inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse)
GET_MODEL_INFO = Method("Control/GetModelInfo", control_pb2.GetModelInfoRequest, control_pb2.GetModelInfoResponse)
GET_SERVER_INFO = Method("Control/GetServerInfo", control_pb2.GetServerInfoRequest, control_pb2.GetServerInfoResponse)
GET_LOAD = Method("Control/GetLoad", control_pb2.GetLoadRequest, control_pb2.GetLoadResponse)
ABORT = Method("Control/Abort", control_pb2.AbortRequest, control_pb2.AbortResponse)
FLUSH_CACHE = Method("Control/FlushCache", control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse)
DRAIN = Method("Control/Drain", control_pb2.DrainRequest, control_pb2.DrainResponse)
