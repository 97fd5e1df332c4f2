"""What browsers and load balancers ask for: other origins, HTTPS, HEAD and OPTIONS."""

import ssl

import httpx
import pytest
from request_bodies import CHAT, MESSAGES, bearer

from dsjax.errors import UserError
from dsjax.serve.options import HttpOptions, ServeOptions

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUL7FhYMPm06OlRlvl3oMRY8YNnT4wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTE4MDMyOFoYDzIxMjYxMTA1
MTgwMzI4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATiKfHgaa36dBu7fJvBuhATi01JuiYSLkfyYozfncVskNVMDaTOoPHH
WmkH0yHUCqT5tDrZ7XzPh9Gr3/cSgLL0o2QwYjAdBgNVHQ4EFgQUCHFRs5T5PWY2
BjF0a+WT58c0Z2owHwYDVR0jBBgwFoAUCHFRs5T5PWY2BjF0a+WT58c0Z2owDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IF958kMkKerCye8QJFsKQfXf+6eBpeCIQ7JiuR1Td4yaAiEAmpblSqE7nRq/bpmp
qeqAHRUlTv/1zEJuQ3ERP+JyOHY=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg4zpHu4V01+PrL4pN
nIbUGOzejOlE2g8umWupb9GmWsChRANCAATiKfHgaa36dBu7fJvBuhATi01JuiYS
LkfyYozfncVskNVMDaTOoPHHWmkH0yHUCqT5tDrZ7XzPh9Gr3/cSgLL0
-----END PRIVATE KEY-----
"""
"""A key of these tests alone, of a certificate for 127.0.0.1 that signs itself."""

PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
BODY = {"messages": MESSAGES, "max_tokens": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_text(CERTIFICATE)
    (folder / "key.pem").write_text(KEY)
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def test_pages_of_an_allowed_origin_may_read_answers_also_streamed(start_server):
    server = start_server(options=ServeOptions(allowed_origins=f'["{PAGE}"]', api_keys=("key",)))

    def allowed(origin=PAGE, key="key", stream=False) -> tuple[int, str | None]:
        answer = server.post(CHAT, {**BODY, "stream": stream}, headers={"Origin": origin, **bearer(key)})
        return answer.status_code, answer.headers.get("access-control-allow-origin")

    asked = httpx.options(server.url + CHAT, headers=PREFLIGHT)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
    assert allowed() == allowed(stream=True) == (200, PAGE)
    assert allowed(key="wrong") == (401, PAGE)
    assert allowed("http://evil.example") == (200, None)


def test_no_other_origin_is_allowed_unless_one_is_named(server):
    asked = httpx.options(server.url + CHAT, headers=PREFLIGHT)
    assert (asked.status_code, asked.headers["allow"]) == (204, "POST")
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("origins", ["https://chat.example", "{}", "[1]"])
def test_origins_are_a_json_list(origins):
    with pytest.raises(UserError, match="expected a JSON list of origins"):
        HttpOptions(allowed_origins=origins)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/version"])
def test_head_is_answered_as_get_without_its_body(server, path):
    asked, answer = httpx.get(server.url + path), httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == asked.headers["content-length"]
    assert httpx.options(server.url + path).headers["allow"] == "GET, HEAD"


def test_head_of_what_is_not_there_is_404_and_of_a_post_405(server):
    assert httpx.head(f"{server.url}/v1/models/other").status_code == 404
    assert httpx.head(server.url + CHAT).status_code == 405
    assert httpx.options(f"{server.url}/nowhere").status_code == 404


@pytest.mark.parametrize("front_ends", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_https_serves_answers_and_streams(start_server, files, front_ends):
    server = start_server(options=ServeOptions(**files), front_ends=front_ends)
    context = ssl.create_default_context(cafile=files["ssl_certfile"])
    with httpx.Client(verify=context, base_url=server.url.replace("http:", "https:")) as client:
        assert client.get("/ready").json() == {"status": "ready", "compiling": False}
        answer, streamed = (client.post(CHAT, json={**BODY, "stream": stream}) for stream in (False, True))
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_certificate_that_cannot_be_is_refused_at_the_start_and_the_url_names_the_scheme(files, tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for options in ({**files, "ssl_keyfile": str(wrong)}, {"ssl_certfile": str(tmp_path / "missing.pem")}):
        with pytest.raises(UserError, match=r"no certificate with its private key, without a password"):
            HttpOptions(**options)
    with pytest.raises(UserError, match="--ssl-keyfile is given without --ssl-certfile"):
        HttpOptions(ssl_keyfile=files["ssl_keyfile"])
    assert HttpOptions(**files).url("127.0.0.1", 8000) == "https://127.0.0.1:8000"
    assert HttpOptions().url("::1", 8000) == "http://[::1]:8000"
