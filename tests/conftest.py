"""Fixtures that every test may use: a private environment, tiny checkpoints of each family, the demo's model."""

import atexit
import fcntl
import gc
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path

import certifi
import pytest
from hypothesis import settings

# Prefect and the model cache read these when they are imported, so they are set before anything else is.
_PRIVATE = tempfile.TemporaryDirectory(prefix="batchloom-tests-")
# One cache for all of pytest's processes: kernels (Triton's, too) are compiled and GGUF files converted once.
_CACHE = os.environ.setdefault("BATCHLOOM_TESTS_CACHE", f"{_PRIVATE.name}/cache")
os.environ.update(
    BATCHLOOM_CACHE=_CACHE,
    TRITON_CACHE_DIR=f"{_CACHE}/triton",
    TRITON_DISABLE_LINE_INFO="1",  # a sixth less to compile, for the same machine code
    PREFECT_HOME=f"{_PRIVATE.name}/prefect",
    PREFECT_LOCAL_STORAGE_PATH=f"{_PRIVATE.name}/prefect/storage",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    OMP_NUM_THREADS="1",  # cores are shared by more processes than there are
    GOMP_SPINCOUNT="3000",
    PREFECT_CLI_PROMPT="false",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
)

# Each of Prefect's clients reads 35 ms of certificates that it does not use; here it reads one.
_CERTIFICATE = Path(_PRIVATE.name, "certificate.pem")
_CERTIFICATE.write_text("".join(Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")[:2]) + "\n")
os.environ.update(SSL_CERT_FILE=str(_CERTIFICATE), PREFECT_API_SSL_CERT_FILE=str(_CERTIFICATE))

# Processes inherit an ignored SIGINT, as of a shell's background job; nights of the tests are interrupted by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported while tests are collected stays: no garbage is looked for in it, then or later.
gc.set_threshold(100_000)


@atexit.register
def _close_stderr() -> None:
    """Registered first, so called last: after it, DuckDB's bindings list as leaks what the test session still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# The same examples on every machine where failures are to be compared, new ones where somebody looks for them.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "search")


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: a fourth of the suite's time is waiting for other processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that none of them is begun when all other processes are about to end."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(700)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "odd")
VOCAB_SIZE = 512
MAX_POSITIONS = 1024

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_TEMPLATE = CHAT_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen3's: thinking is on unless the variable turns it off."""
TOKENIZER_TEXT = (
    "A night watchman walks around the house and writes down what he has seen.",
    "The first query asks for the author of the document; the second asks when it was written.",
    "Answer the question with words from the text. Is this document about the question? Answer yes or no.",
    "Rows come in, rows go out: 0 1 2 3 4 5 6 7 8 9, each one once, in the order of their keys.",
    "Ein Wächter geht nachts um das Haus. Le veilleur écrit ce qu'il a vu. 夜警は見たことを書く。",
    "def answer(question):\n    return {'text': question.strip(), 'score': 0.5}\n",
)


@pytest.fixture(scope="session", autouse=True)
def private_environment() -> Iterator[None]:
    """Removes the private folders when the last test has run."""
    yield
    _PRIVATE.cleanup()


@contextmanager
def _in_turn(name: str) -> Iterator[None]:
    """Of all of pytest's processes, one at a time is in a block of this name."""
    Path(_CACHE).mkdir(parents=True, exist_ok=True)
    with open(f"{_CACHE}/{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def prefect_database() -> Path:
    """A Prefect database as it is after its migrations, made once for all of pytest's processes; to be copied.

    The private folder of Prefect has a copy, which servers of command lines use.
    """
    made, part = (Path(_CACHE, name) for name in ("prefect.db", "prefect.part"))
    with _in_turn(made.name):
        if not made.exists():
            environment = os.environ | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{part}"}
            upgrade = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
            subprocess.run(upgrade, env=environment, check=True, stdout=subprocess.DEVNULL)
            with closing(sqlite3.connect(part)) as connection:
                connection.execute("vacuum into ?", [str(made)])
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(exist_ok=True)
    shutil.copyfile(made, home / "prefect.db")
    return made


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the checkpoint folder of a family ("llama", "mistral", "qwen2", "qwen3"), made once a session.

    Random float32 weights from a fixed seed in safetensors, a byte-level BPE tokenizer, a chat template; grouped query
    heads everywhere. Norms and biases are random too, so that one left out shows.
    """
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(f"tiny-{family}")
            shutil.copytree(_make_checkpoint(family), folders[family], dirs_exist_ok=True)
        return folders[family]

    return make


def _make_checkpoint(family: str) -> Path:
    """The checkpoint of a family in the cache, made once for all of pytest's processes by this file."""
    maker = hashlib.sha256(Path(__file__).read_bytes() + version("transformers").encode())
    made = Path(_CACHE, f"tiny-{family}-{maker.hexdigest()[:16]}")
    with _in_turn(made.name):
        if not made.exists():
            part = Path(f"{made}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _save_model(family, part)
            _save_tokenizer(part)
            part.rename(made)
    return made


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Callable[[str], Path]) -> Path:
    """The folder of a tiny Llama, for tests that any model serves."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def thinking_checkpoint(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 whose chat template has a switch for thinking, with marks around thoughts."""
    import transformers

    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo's model as a GGUF file; `make test` puts it where it is looked for, and its absence is a failure."""
    from flows.demo import find_demo_model

    return find_demo_model()


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path) -> Path:
    """The folder that `smollm2_gguf` is opened as, made once for all of pytest's processes."""
    from engine.model.loading.checkpoint import resolve_checkpoint

    with _in_turn("smollm2"):
        return resolve_checkpoint(smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2_unpacked(smollm2_folder: Path) -> Path:
    """That folder with weights in float32, made once for all of pytest's processes."""
    from engine.model.loading.gguf import unpack_gguf

    with _in_turn("smollm2"):
        return unpack_gguf(smollm2_folder)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The demo's embedding model, where `make test` puts it; its absence is a failure."""
    from flows.demo import find_embedding_model

    folder = find_embedding_model()
    assert folder is not None, "run `make test`, which installs it"
    return folder


def _save_model(family: str, folder: Path) -> None:
    import torch
    import transformers

    shape = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "num_hidden_layers": 2,
        "intermediate_size": 160,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    configs = {
        "llama": transformers.LlamaConfig(
            **shape, hidden_size=96, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True
        ),
        "mistral": transformers.MistralConfig(
            **shape, hidden_size=64, num_attention_heads=4, num_key_value_heads=1, sliding_window=None
        ),
        "qwen2": transformers.Qwen2Config(
            **shape, hidden_size=96, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
        ),
        "qwen3": transformers.Qwen3Config(
            **shape, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True
        ),
        "odd": transformers.LlamaConfig(  # sizes that the C++ layers do not support
            **shape | {"intermediate_size": 172},
            hidden_size=72,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        ),
    }
    if family not in configs:
        raise ValueError(f"no tiny checkpoint of family {family!r}; there are {FAMILIES}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(FAMILIES.index(family) + 1)
        model = transformers.AutoModelForCausalLM.from_config(configs[family], dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = name.endswith("norm.weight")
                parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.2 if is_norm else 0.12)
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=CONTROL_TOKENS[0],
        eos_token=CONTROL_TOKENS[2],
        pad_token=CONTROL_TOKENS[0],
        additional_special_tokens=list(CONTROL_TOKENS),
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
