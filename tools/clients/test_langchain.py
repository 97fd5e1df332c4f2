"""langchain-tests' integration tests of chat models, by langchain-deepseek: what a text model can take, with and without reasoning."""

import pytest
from langchain_deepseek import ChatDeepSeek
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChat(ChatModelIntegrationTests):
    """Without reasoning."""

    chat_model_class = ChatDeepSeek
    supports_json_mode = True
    model_override_value = "deepseek-r1"
    thinking = False

    @pytest.fixture(autouse=True)
    def _with_url(self, url):
        type(self).chat_model_params = {
            "model": "deepseek-r1",
            "api_key": "none",
            "api_base": url,
            "temperature": 0,
            "stream_usage": True,  # langchain asks it of OpenAI by itself
            "extra_body": {"chat_template_kwargs": {"thinking": self.thinking}},
        }


class TestReasoner(TestChat):
    """With reasoning."""

    thinking = True
