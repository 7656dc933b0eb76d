"""From a request's bytes to a checked model of it. Sizes are capped before, in `limits`."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from hybridserve.cluster.ingress.errors import ApiError, brief, from_validation
from hybridserve.cluster.ingress.json_text import from_json

Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, model: type[Model]) -> Model:
    """The body as a `model`.

    Raises:
        ApiError: 400, naming what is wrong with it.
    """
    return parse(await request.body(), model)


def parse(body: bytes, model: type[Model]) -> Model:
    try:
        value = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {brief(value)}", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None
