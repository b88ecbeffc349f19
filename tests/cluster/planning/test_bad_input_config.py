"""Configurations that cannot work, each refused before anything starts, with the setting to change."""

import socket
import threading
from pathlib import Path

import pytest
import ray
import torch
from click.testing import CliRunner
from expert_pool.cluster import ConfigError, ExpertPool, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.config import checked, load_config
from expert_pool.cluster.driver.recovery import RecoveryConfig


@pytest.fixture
def said_of_config(refused, prompts_file, random_models, tmp_path):
    """What the command line says of a configuration file, with the path of the file cut out."""

    def run(text: str, *options: str) -> str:
        config = tmp_path / "pool.yaml"
        config.write_text(text.replace("MODEL", random_models["qwen3_moe"]))
        prompts = prompts_file({"prompt_token_ids": [5]})
        output = tmp_path / "out.jsonl"
        said = refused("generate", "--config", config, "--prompts", prompts, "--output", output, *options)
        assert not output.exists()
        return said.replace(f"--config {config}", "--config FILE")

    return run


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: MODEL\nrank: 2", "--config FILE: unknown key rank: did you mean ranks?"),
        (
            "model: MODEL\nxyz: 2",
            "--config FILE: unknown key xyz: known: model, ranks, min_ranks, max_ranks, attn_tp_size, dtype",
        ),
        (
            "model: MODEL\nlimits: {chunk_prefill_size: 5}",
            "unknown key limits.chunk_prefill_size: did you mean limits.chunked_prefill_size?",
        ),
        (
            "model: MODEL\nplacement: {timeout: 5}",
            "unknown key placement.timeout: did you mean placement.timeout_s?",
        ),
        ("model: MODEL\nranks: two", "--config FILE: ranks='two': set ranks to an integer"),
        (
            "model: MODEL\ndtype: float64",
            "--config FILE: dtype='float64': set dtype to one of float32, bfloat16, float16",
        ),
        ("model: MODEL\nworker: {device: gpu}", "worker.device='gpu': set worker.device to one of cpu, cuda"),
        ("model: MODEL\nlimits: 5", "--config FILE: limits=5: set limits to a mapping"),
        (
            "model: MODEL\nlimits: {cuda_graph_bs: [1, x]}",
            "limits.cuda_graph_bs[1]='x': set limits.cuda_graph_bs[1] to an integer",
        ),
        ("model: MODEL\nworker: {environment: {A: 5}}", "set every value of worker.environment to a text"),
        ("model: MODEL\nranks: 2\nranks: 4", "FILE: the key 'ranks' is there twice, the second time in line 3"),
        ('{"model": "MODEL", "ranks": 2, "ranks": 4}', "--config FILE: the key 'ranks' is there twice"),
        ("model: MODEL\nlimits: []", "--config FILE: limits=[]: set limits to a mapping"),
        ("ranks: 2", "--config FILE: model is missing: set it"),
        ("- model", "--config FILE: holds list, not a mapping of settings"),
        ("# model: none yet", "--config FILE: holds nothing, not a mapping of settings"),
        ("model: [", "--config FILE: neither YAML nor JSON"),
        ("model: !!bool maybe", "--config FILE: neither YAML nor JSON"),
        ("model: !!timestamp x", "--config FILE: neither YAML nor JSON"),
        ("ranks: !!int ''", "--config FILE: neither YAML nor JSON"),
        ("model: MODEL\nranks: 0", "ranks=0 is not a positive multiple of attn_tp_size=1"),
        ("model: MODEL\nranks: -2", "ranks=-2 is not a positive multiple of attn_tp_size=1"),
        ("model: MODEL\nranks: 3\nattn_tp_size: 2", "ranks=3 is not a positive multiple of attn_tp_size=2"),
        ("model: MODEL\nattn_tp_size: 0", "ranks=1 is not a positive multiple of attn_tp_size=0"),
        ("model: MODEL\nlimits: {chunked_prefill_size: -1}", "limits.chunked_prefill_size=-1 is below 0"),
        ("model: MODEL\nlimits: {max_running_requests: 0}", "limits.max_running_requests=0 is below 1"),
        ("model: MODEL\ncache: {block_size: 0}", "cache.block_size=0 is not between 1 and 65,536"),
        ("model: MODEL\ncache: {num_tokens: 0}", "cache.num_tokens=0 is not between 1 and 2,147,483,647"),
        ("model: MODEL\ncache: {max_bytes: -5}", "cache.max_bytes=-5 is not between 1 and 2**63"),
        ("model: MODEL\nworker: {threads: 0}", "worker.threads=0 is not between 1 and 4,096: set it to"),
        ('model: MODEL\nworker: {environment: {"A=B": c}}', "worker.environment sets 'A=B' to 'c': no variable can"),
        (
            'model: MODEL\nworker: {environment: {"A": "\\ud800"}}',
            "worker.environment sets 'A' to '\\ud800', which is no",
        ),
        (
            "model: MODEL\nranks: 2\naddress: local\nlimits: {max_running_requests: 1000000000}",
            "2 of ranks=2 on this machine do not fit into its memory of ",
        ),
        (
            "model: MODEL\naddress: local\ncache: {num_tokens: 2147483647, block_size: 65536}",
            "Lower limits.max_running_requests, limits.chunked_prefill_size, cache.num_tokens or",
        ),
        ("model: MODEL\nworker: {step_timeout_s: 0}", "worker.step_timeout_s=0.0 is not between 1 and 1e+07"),
        ("model: MODEL\nplacement: {timeout_s: 0}", "placement.timeout_s=0.0 is not above 0"),
        ("model: MODEL\nplacement: {gpus_per_rank: -1}", "placement.gpus_per_rank=-1.0 is below 0"),
        ("model: MODEL\nplacement: {cpus_per_rank: .nan}", "placement.cpus_per_rank=nan is not at most 1e+06"),
        ("model: MODEL\nplacement: {gpus_per_rank: .inf}", "placement.gpus_per_rank=inf is not at most 1e+06"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(text, complaint, said_of_config):
    assert complaint in said_of_config(text)


def test_an_option_out_of_bounds_is_refused_like_a_setting(said_of_config):
    said = said_of_config("model: MODEL", "--ranks", "3", "--attn-tp-size", "2")
    assert "ranks=3 is not a positive multiple of attn_tp_size=2: set ranks to dp_size * attn_tp_size" in said


def test_a_config_file_that_is_missing(refused, prompts_file, tmp_path):
    prompts = prompts_file({"prompt_token_ids": [5]})
    path = tmp_path / "nowhere.yaml"
    said = refused("generate", "--config", path, "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert f"--config {path}: No such file or directory" in said


def test_no_model_at_all(refused, prompts_file, tmp_path):
    prompts = prompts_file({"prompt_token_ids": [5]})
    said = refused("generate", "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    assert "give --model FOLDER, or --config FILE with a model" in said


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head..local:6379", "head:²"])
def test_an_address_where_no_cluster_answers(address, refused, prompts_file, random_models, tmp_path):
    said = refused(
        *("generate", "--model", random_models["qwen3_moe"], "--prompts", prompts_file({"prompt_token_ids": [5]})),
        *("--output", tmp_path / "out.jsonl", "--address", address),
    )
    assert f"address={address!r}: no Ray cluster answers there" in said


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_an_address_where_something_else_listens(answer, refused, prompts_file, random_models, tmp_path, monkeypatch):
    """Ray would wait for minutes."""
    monkeypatch.setattr("expert_pool.cluster.ray_session.session._CONNECT_S", 1.0)
    prompts = prompts_file({"prompt_token_ids": [5]})
    with socket.create_server(("127.0.0.1", 0)) as server:
        if answer is not None:
            threading.Thread(target=lambda: server.accept()[0].sendall(answer), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = refused(
            *("generate", "--model", random_models["qwen3_moe"], "--prompts", prompts),
            *("--output", tmp_path / "out.jsonl", "--address", address),
        )
    assert f"address='{address}': no Ray cluster answers there: " in said


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("http://127.0.0.1:8265", "is the job server, which takes `ray job submit`; an address here is the HOST:PORT"),
        ("ray://127.0.0.1:10001", "is Ray Client, through which a pool cannot be driven: run this on the cluster"),
        ("somewhere", "no Ray cluster answers there"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "status"])
def test_an_address_in_the_environment_is_held_to_like_one_that_is_given(
    command, address, complaint, refused, prompts_file, random_models, tmp_path, monkeypatch
):
    """Nothing starts a local cluster instead."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    prompts = prompts_file({"prompt_token_ids": [5]})
    run = ("generate", "--model", random_models["qwen3_moe"], "--prompts", prompts, "--output", tmp_path / "out.jsonl")
    said = refused(*(run if command == "generate" else ("status", "--pool", "shared")))
    assert said.startswith(f"refused: RAY_ADDRESS={address!r} in the environment")
    assert complaint in said


def test_gpus_that_a_machine_lacks_are_missed_at_once(tiny_moe, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    arguments = ["--model", tiny_moe, "--device", "cuda", "--ranks", "2", "--address", "local"]
    result = CliRunner().invoke(
        main, ["generate", *arguments, "--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    )
    assert result.exit_code == 2
    assert "worker.device='cuda' with ranks=2 needs 2 GPUs, this machine has 0" in result.output
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"ranks": "2"}, "ranks='2': set ranks to an integer"),
        ({"limits": {"max_running_requests": "3"}}, "limits.max_running_requests='3': set"),
        ({"limits": {"max_runing": 3}}, "unknown key limits.max_runing: did you mean limits.max_running_requests?"),
        ({"worker": WorkerConfig(device="tpu")}, "worker.device='tpu': set worker.device to one of cpu, cuda"),
        ({"dtype": torch.float32}, "dtype='torch.float32': set dtype to one of float32, bfloat16, float16"),
        ({"worker": WorkerConfig(threads=1.5)}, "threads"),
        ({"worker": {"step_timeout_s": float("inf")}}, "step_timeout_s"),
    ],
)
def test_a_configuration_written_in_python_is_held_to_its_types(settings, complaint, tiny_moe):
    with pytest.raises(ConfigError, match=complaint):
        ExpertPool.launch(PoolConfig(model=tiny_moe, address="local", **settings))
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "text",
    [
        '{\n\t"model": "\\ud83d\\ude00",\n\t"ranks": 2,\n\t"recovery": {"window_s": 1e2}\n}',
        'model: "\\U0001F600"\n<<: &b {ranks: 3}\nranks: 2\nrecovery:\n  <<: {window_s: 5}\n  window_s: 100\nlimits:\n',
    ],
    ids=["JSON with tabs, pairs of escapes and exponents", "YAML that merges, with an empty section"],
)
def test_a_configuration_is_read_as_json_and_yaml_mean_it(text, tmp_path):
    file = tmp_path / "pool"
    file.write_text(text)
    wanted = PoolConfig(model="\U0001f600", ranks=2, recovery=RecoveryConfig(window_s=100.0))
    assert load_config(str(file)) == wanted


def test_a_model_may_be_a_path_in_python(tiny_moe):
    assert checked(PoolConfig(model=Path(tiny_moe))).model == tiny_moe


def test_sections_may_be_mappings_in_python_too(tiny_moe):
    assert checked(PoolConfig(model=tiny_moe, limits={"max_running_requests": 3})).limits.max_running_requests == 3


def test_a_trace_that_cannot_be_written_is_refused(tmp_path, refused, tiny_moe, prompts_file):
    prompts = prompts_file({"prompt": "x"})
    (tmp_path / "folder").mkdir()
    arguments = ["--model", tiny_moe, "--prompts", prompts, "--output", tmp_path / "out.jsonl"]
    said = refused("generate", *arguments, "--trace", tmp_path / "folder")
    assert f"--trace {tmp_path / 'folder'}: cannot be written" in said


def test_a_refused_run_leaves_an_old_trace_as_it_is(tmp_path, refused, tiny_moe, prompts_file):
    (tmp_path / "trace.json").write_text("old")
    arguments = ["--model", tiny_moe, "--ranks", "3", "--prompts", prompts_file({"prompt": "x"})]
    refused("generate", *arguments, "--output", tmp_path / "out.jsonl", "--trace", tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == "old"


@pytest.mark.parametrize("option", ["--prompts", "--output"])
def test_a_trace_that_would_take_the_place_of_another_file_of_the_run_is_refused(
    option, tmp_path, refused, tiny_moe, prompts_file
):
    files = {"--prompts": Path(prompts_file({"prompt": "x"})), "--output": tmp_path / "out.jsonl"}
    before = files["--prompts"].read_text()
    (tmp_path / "link").symlink_to(files[option])
    arguments = [part for pair in files.items() for part in pair]
    said = refused("generate", "--model", tiny_moe, *arguments, "--trace", tmp_path / "link")
    assert f"--trace {tmp_path / 'link'}: is the file of {option}, which it would write over" in said
    assert files["--prompts"].read_text() == before
    assert not files["--output"].exists()


def test_a_trace_of_a_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match=r"worker\.trace_steps=-1 is not between 0 and 1,000,000"):
        WorkerConfig(trace_steps=-1)
