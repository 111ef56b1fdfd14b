"""The commands of `batchloom`, and how their help shows them."""

from typing import Any

COMMANDS = {
    "nightly": "Answer the rows without an answer. batchloom nightly NIGHT.toml [--until 06:00] runs a night file.",
    "check": "Find the errors of a night, in seconds, without loading a model; --show N prints its first prompts.",
    "explain": "Predict what a night, or NIGHT.toml, would do and how long it would take, without loading a model.",
    "advise": "Show how many tokens the order of a prompt's fields and instructions costs, and the best order.",
    "report": "Write the report of a run: one HTML file that needs no other file.",
    "evaluate": "Compare answers with gold rows or another run: accuracy, F1, nDCG, calibration, with intervals.",
    "compare": "Answer a sample of rows with two prompts, or two models, and show which answers change.",
    "calibrate": "Correct probabilities by gold rows: of answers with probability 0.9, nine in ten should be right.",
    "demo": "Run the nightly flow on a demo database and show its results.",
}
"""Their help texts, in the order of `batchloom --help`."""

HELP_FLAGS = ("--help", "-h", "--help-all")

FLAGS = {
    "explain": {"json": "print JSON instead of a page"},
    "nightly": {"json": "print the summaries as JSON on standard output, the log on standard error"},
}
"""By command, options that are no parameters of its flow, with their help texts."""

MODULES = {
    "check": "flows.nights.check",
    "evaluate": "flows.quality.evaluate",
    "calibrate": "flows.quality.calibrate",
    "compare": "flows.quality.compare",
}
"""By command, the module if it is not `flows.COMMAND`."""

OF_NIGHT_FILES = {
    "nightly": ("flows.nights.night", "night"),
    "explain": ("flows.nights.explain_night", "explain_night"),
}
"""By command, the module and the flow for a night file, which is its first argument."""

ARGUMENTS = {
    **dict.fromkeys(OF_NIGHT_FILES, ("file", "NIGHT.toml")),
    "compare": ("workloads", "OLD.toml NEW.toml --database PATH --model STR"),
    "check": ("file", "[NIGHT.toml]"),
    "advise": ("workload", "WORKLOAD"),
}
"""By command, the parameter that may be given without its name, and the required arguments as the help shows them."""


def show_default(value: Any) -> str | None:
    """A default for the help; None where an option is off or empty unless it is given."""
    is_off = value is None or value is False or value in ("", ())
    return None if is_off else ", ".join(value) if isinstance(value, tuple) else str(value)
