"""A tiny model that writes ASCII, what one device's engine answers with it, and Dynamo's frontend before workers that have it.

Frontends hold back what is no UTF-8 yet, and a random model's bytes seldom are.
"""

import json
import signal
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers
from deployment import Frontend, Worker, wait_until
from tiny_tokenizer import BOS, CONFIG, EOS
from tokenizers import decoders, models, pre_tokenizers, trainers
from worded_checkpoint import write_worded_checkpoint

from dsjax import LLM, SamplingParams

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 32, "page_size": 16, "max_model_len": 256}


class Alone:
    """One device's engine. options: of a worker with the same model and sizes, which calls it `tiny`."""

    def __init__(self, folder: Path):
        letters = [*string.digits, *string.ascii_letters, *string.punctuation, "Ġ", "Ċ"]
        ascii_only = tokenizers.Tokenizer(models.BPE())
        ascii_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        ascii_only.decoder = decoders.ByteLevel()
        learns = {"vocab_size": 128, "special_tokens": [BOS, EOS], "initial_alphabet": letters, "show_progress": False}
        texts = ["def main(): return value_1 = 2\n", "import numpy as np"] * 4
        ascii_only.train_from_iterator(texts, trainers.BpeTrainer(**learns))
        config = {"vocab_size": ascii_only.get_vocab_size(), "max_position_embeddings": SIZES["max_model_len"]}
        model = write_worded_checkpoint(folder, **config, bos_token_id=0, eos_token_id=1)
        ascii_only.save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"bos_token": BOS}))  # Dynamo takes no object
        self.engine = LLM(str(model), mesh="dp=1", **SIZES)
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        self.options = (f"--model={model}", "--served-model-name=tiny", *sizes)

    def ids(self, text: str) -> list[int]:
        """A prompt as frontends read it: by tokenizer.json alone, which puts no begin-of-sequence token before it."""
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def answers(self, prompts: list[str], params: list[dict] | dict) -> list:
        each = params if isinstance(params, list) else [params] * len(prompts)
        ids = [{"prompt_token_ids": self.ids(text)} for text in prompts]
        return [one.outputs[0] for one in self.engine.generate(ids, [SamplingParams(**one) for one in each])]

    def texts(self, prompts: list[str], params: list[dict] | dict) -> list[str]:
        return [completion.text for completion in self.answers(prompts, params)]


class Deployment:
    """The frontend and workers by name, which can be started, dropped and asked."""

    def __init__(self, folder: Path):
        import openai

        self.folder, self.workers, self.frontend = folder, {}, Frontend(folder)
        url = f"{self.frontend.url}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240)

    def start(self, name: str, *options: str, kind: type = Worker):
        """Give a worker, which is not ready yet. kind: `Worker`, or `Group` for two processes."""
        self.workers[name] = kind(self.folder, name, *options)
        return self.workers[name]

    def wait(self) -> None:
        wait_until(lambda: all(worker.is_ready for worker in self.workers.values()), what="the workers are ready")
        wait_until(lambda: self.frontend.num_workers() == len(self.workers), what="the frontend knows them")
        wait_until(lambda: self.frontend.serves("tiny"), what="the frontend serves their model")

    def drop(self, name: str) -> None:
        """Return when the frontend has forgotten a worker. It is killed where it has not ended."""
        self.workers.pop(name).end(signal.SIGKILL)
        wait_until(lambda: self.frontend.num_workers() == len(self.workers), what="the frontend knows that it has gone")

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *failed: object) -> None:
        for process in (self.frontend, *self.workers.values()):
            process.end(signal.SIGKILL)

    def complete(self, text: str, **params):
        """One completion, as OpenAI's client gives it. ``ignore_eos`` and others that OpenAI has not go as they are."""
        more = {name: params.pop(name) for name in ("ignore_eos", "guided_regex", "cache_salt") if name in params}
        return self.client.completions.create(model="tiny", prompt=text, extra_body=more, **params)

    def ask_all(self, prompts: list[str], params: list[dict] | dict) -> list[str]:
        def ask(number: int) -> str:
            given = params[number] if isinstance(params, list) else params
            answer = self.complete(prompts[number], stream=number % 2 == 1, **given)
            return "".join(part.choices[0].text for part in (answer if number % 2 == 1 else [answer]))

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, range(len(prompts))))
