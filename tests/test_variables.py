"""Which variables are set: whose names count, and which stop the start. What they set is tested with the settings."""

from __future__ import annotations

import pytest

from app.errors import StartError
from app.variables import Given, read, without_counterpart

FIELDS = {"MLXCEL_PORT": "port", "MLXCEL_TCP_PORT": "port", "MLXCEL_API_KEYS": "api_keys"}


def given(**environment: str) -> dict[str, Given]:
    return read(environment, FIELDS, {"api_keys"})


def test_names_of_others_are_left_alone_and_empty_ones_unset() -> None:
    assert given(PATH="/bin", MLXCEL_PORT="", LLAMA_ARG_HOST="") == {}


def test_our_own_name_counts_before_that_of_llama_server() -> None:
    assert given(MLXCEL_PORT="1", LLAMA_ARG_PORT="2") == {"port": Given("MLXCEL_PORT", "1", "environment")}
    assert given(MLXCEL_PORT="", LLAMA_ARG_PORT="2") == {
        "port": Given("LLAMA_ARG_PORT", "2", "environment LLAMA_ARG_PORT")
    }


def test_two_names_of_our_own_must_agree() -> None:
    assert given(MLXCEL_PORT="1", MLXCEL_TCP_PORT="1")["port"].name == "MLXCEL_PORT"
    with pytest.raises(StartError, match="MLXCEL_PORT='1' and MLXCEL_TCP_PORT='2' set the same thing"):
        given(MLXCEL_PORT="1", MLXCEL_TCP_PORT="2")


@pytest.mark.parametrize("name", ["MLXCEL_API_KEYS", "LLAMA_API_KEY"])
@pytest.mark.parametrize("value", ["", " , "])
def test_a_key_that_came_out_empty_stops_the_start(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"{name} is set and holds no key"):
        given(**{name: value})


def test_an_empty_key_of_llama_servers_name_stops_the_start_only_where_it_counts() -> None:
    assert given(MLXCEL_API_KEYS="k", LLAMA_API_KEY="")["api_keys"].value == "k"


def test_a_name_that_is_not_known_stops_the_start_if_it_looks_like_ours() -> None:
    with pytest.raises(StartError, match=r"did you mean MLXCEL_PORT\?"):
        given(MLXCEL_PORTS="1")
    assert given(LLAMA_ARG_ZAP="1") == {}


def test_what_has_no_counterpart_is_found() -> None:
    names = {"LLAMA_ARG_ZAP": "1", "LLAMA_ARG_PORT": "1", "LLAMA_LOG": "1", "MLXCEL_PORT": "1", "LLAMA_ARG_A": ""}
    assert without_counterpart(names) == ["LLAMA_ARG_A", "LLAMA_ARG_ZAP"]
