"""`StrictModel`: how every request body is read."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """JSON types are taken as they are, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
