"""The HTTP application as a value: give it a service, settings and counters, and it is complete."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from app.api import endpoints, llama, page, responses
from app.api.completions import IGNORED_HEADER, chat_completions, completions
from app.api.errors import respond
from app.api.keys import Keys
from app.api.messages import count_tokens, messages
from app.api.middleware import Access, ApiKeys
from app.api.openapi import openapi
from app.api.rate_limit import LIMIT_HEADERS, RateLimits
from app.api.response_store import ResponseStore
from app.api.seam import Counting, HttpSettings, Serving, Wiring
from app.api.unsupported import unsupported_routes
from app.errors import MlxcelError


def create_app(service: Serving, settings: HttpSettings, metrics: Counting) -> Starlette:
    """Build the application. Nothing is started or shared: two applications may live side by side.

    Raises:
        StartError: the file of API keys cannot be read or is empty.
    """
    app = Starlette(
        routes=[*routes(), *(page.routes() if settings.ui else [])],
        middleware=_middleware(settings, metrics, Keys(settings.api_keys, settings.api_key_file)),
        exception_handlers={MlxcelError: respond, HTTPException: respond},
    )
    # A redirect would be built from the client's Host header; a wrong slash is a 404 like any other wrong path.
    app.router.redirect_slashes = False
    limits = RateLimits(
        settings.rate_limit_requests, settings.rate_limit_tokens, concurrent=settings.rate_limit_concurrent
    )
    app.state.wiring = Wiring(service, settings, metrics, limits, ResponseStore(settings.response_store))
    return app


def routes() -> list[Route]:
    """HEAD comes with every GET. What each takes and gives stands in ``app.api.operations``."""
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/completion", llama.completion, methods=["POST"]),
        Route("/completions", llama.completion, methods=["POST"]),
        Route("/infill", llama.infill, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.StoredResponse),
        Route("/v1/responses/{response_id}/input_items", responses.input_items),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/models", endpoints.list_models),
        Route("/v1/models/", endpoints.list_models),
        Route("/v1/models/{model_id:path}", endpoints.get_model),
        Route("/health", endpoints.health),
        Route("/v1/health", endpoints.health),
        Route("/health/live", endpoints.live),
        Route("/health/ready", endpoints.ready),
        Route("/slots", endpoints.slots),
        Route("/metrics", endpoints.metrics),
        Route("/v1/config", endpoints.config),
        Route("/v1/recording", endpoints.recording),
        Route("/v1/cache/stats", endpoints.cache_stats),
        Route("/v1/cache/reset", endpoints.cache_reset, methods=["POST"]),
        Route("/props", endpoints.props),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/apply-template", endpoints.apply_template, methods=["POST"]),
        Route("/openapi.json", openapi),
        *unsupported_routes(),
    ]


def _middleware(settings: HttpSettings, metrics: Counting, keys: Keys) -> list[Middleware]:
    """Outermost first: a refused key still gets a request id, a log line and, for a browser, CORS headers."""
    stack = [Middleware(Access, metrics=metrics)]
    if settings.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after", IGNORED_HEADER, *LIMIT_HEADERS],
            )
        )
    if keys:
        stack.append(Middleware(ApiKeys, keys=keys))
    return stack
