"""langchain-tests' integration tests of chat models, by langchain-deepseek."""

import pytest
from langchain_deepseek import ChatDeepSeek
from langchain_tests.integration_tests import ChatModelIntegrationTests

MODEL = "deepseek-r1"


class TestDeepSeek(ChatModelIntegrationTests):
    """Every test of the suite that a text model can take."""

    @pytest.fixture(autouse=True)
    def _with_url(self, url):
        type(self).url = url

    @property
    def chat_model_class(self):
        return ChatDeepSeek

    @property
    def chat_model_params(self):
        return {"model": MODEL, "api_key": "none", "api_base": self.url, "temperature": 0}

    @property
    def supports_json_mode(self):
        return True

    @property
    def model_override_value(self):
        return MODEL
