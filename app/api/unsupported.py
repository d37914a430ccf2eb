"""Routes of other servers that do not exist here: each says what it would take, instead of being unknown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.errors import FeatureOff

FEATURES = {
    "Embeddings": ("/v1/embeddings", "/embeddings", "/embedding"),
    "Reranking": ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"),
    "Images": ("/v1/images/{rest:path}",),
    "Audio": ("/v1/audio/{rest:path}",),
    "Video": ("/v1/videos", "/v1/videos/{rest:path}"),
    "Realtime sessions": ("/v1/realtime", "/v1/realtime/{rest:path}"),
    "Moderation": ("/v1/moderations",),
    "Storing files": ("/v1/files", "/v1/files/{rest:path}", "/v1/uploads", "/v1/uploads/{rest:path}"),
    "Vector stores": ("/v1/vector_stores", "/v1/vector_stores/{rest:path}"),
    "Batches of requests in a file": ("/v1/batches", "/v1/batches/{rest:path}"),
    "Fine-tuning": ("/v1/fine_tuning/{rest:path}",),
    "Assistants": ("/v1/assistants", "/v1/assistants/{rest:path}", "/v1/threads", "/v1/threads/{rest:path}"),
    "Adapters by request": ("/lora-adapters",),
    "Saving and restoring slots": ("/slots/{slot}",),
}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def unsupported_routes() -> list[Route]:
    """A route for each path, whatever the method: 501 that names the feature."""
    return [
        Route(path, _refusal_of(feature), methods=METHODS, include_in_schema=False)
        for feature, paths in FEATURES.items()
        for path in paths
    ]


def _refusal_of(feature: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise FeatureOff(f"{feature}: not offered by this server, which generates text and nothing else.")

    return refuse
