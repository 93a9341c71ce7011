"""Machine files: every number has a unit and a source. A file with a missing unit or source is refused, with the key."""

from importlib.resources import files

import pytest

from weft.hw import Quantity, available_memory_bytes, known_machines, load_machine


@pytest.mark.parametrize("name", known_machines())
def test_every_shipped_machine_loads_and_prints_each_number(name: str) -> None:
    machine = load_machine(name)
    assert machine.name in str(machine)
    for key in machine:
        assert machine[key].si > 0
        assert f"{machine[key].value:g}" in str(machine)


def test_units_become_bytes_and_seconds() -> None:
    h200 = load_machine("h200")
    assert h200["memory.copy_bandwidth"].si == pytest.approx(4.27e12)
    assert h200["memory.copy_bandwidth"].source == "measured"
    assert h200["memory.l2"].si == 60 * 1024 * 1024
    assert Quantity(7, "us", "paper").si == pytest.approx(7e-6)


@pytest.mark.parametrize("name", known_machines())
def test_what_was_reached_stays_below_the_datasheet(name: str) -> None:
    machine = load_machine(name)
    assert machine["memory.copy_bandwidth"].si < machine["memory.bandwidth"].si
    links = [
        machine[key].si
        for key in machine
        if key.startswith("link.") and machine[key].source in ("measured", "derived") and machine[key].unit == "GB/s"
    ]
    assert max(links) < machine["link.bandwidth"].si
    reached = [machine[key].si for key in machine if key.startswith("compute.bf16_matmul_")]
    assert 0 < max(reached) < machine["compute.bf16_dense"].si


def test_eight_mi300x_as_their_datasheet_and_vendor_have_them() -> None:
    mi300x = load_machine("mi300x")
    assert {key: mi300x[key].si for key in ("compute.multiprocessors", "memory.bandwidth", "link.bandwidth")} == {
        "compute.multiprocessors": 304, "memory.bandwidth": 5.3e12, "link.bandwidth": 64e9,
    }  # fmt: skip
    assert mi300x["link.pair_usable"].si == 48e9
    assert mi300x["compute.bf16_dense"].si == pytest.approx(1307.4e12)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no machine 'h900': give one of .*h200"):
        load_machine("h900")
    with pytest.raises(ValueError, match=r"the machine file nowhere\.toml cannot be read \(No such file"):
        load_machine("nowhere.toml")
    with pytest.raises(KeyError, match=r"memory\.copy_bandwidth"):
        load_machine("h200")["memory.copy"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bandwidth = 4", "memory.bandwidth = 4 needs value, unit and source"),
        ('bandwidth = {value = 4, source = "measured"}', "has unit None"),
        ('bandwidth = {value = 4, unit = "furlong", source = "measured"}', "has unit 'furlong'"),
        ('bandwidth = {value = 4, unit = "TB/s", source = "hearsay"}', "has source 'hearsay'"),
        ('bandwidth = {value = 0, unit = "TB/s", source = "paper"}', "must be a positive number"),
        (
            'bandwidth = {value = nan, unit = "TB/s", source = "paper"}',
            "memory.bandwidth.value is nan: numbers must be finite",
        ),
        (
            'bandwidth = {value = inf, unit = "TB/s", source = "paper"}',
            "memory.bandwidth.value is inf: numbers must be finite",
        ),
        (f'bandwidth = {{value = {"9" * 400}, unit = "TB/s", source = "paper"}}', "value is an integer of 1329 bits"),
        (f'bandwidth = {{value = {"9" * 5000}, unit = "TB/s", source = "paper"}}', "odd.toml cannot be read"),
        (f'bandwidth = {{value = 0x{"f" * 5000}, unit = "TB/s", source = "paper"}}', "an integer of 20000 bits"),
        (
            'bandwidth = {value = 1e308, unit = "TB/s", source = "paper"}',
            r"memory\.bandwidth = 1e\+308 TB/s is implausible: give 0\.02 to 50 TB/s",
        ),
        (
            'bandwidth = {value = 1e-308, unit = "us", source = "paper"}',
            r"memory\.bandwidth is in us: give it in B/s or",
        ),
        (
            'bandwith = {value = 4, unit = "TB/s", source = "paper"}',
            r"memory\.bandwith is not a known key: do you mean memory\.bandwidth",
        ),
        ('bandwidth = {value = 4, unit = 1, source = "paper"}', "has unit 1; use one of"),
        ('bandwidth = {value = 4, unit = "TB/s", source = "paper", note = 1}', "has note 1, which must be a string"),
        ("bandwidth = " + "[" * 200 + "]" * 200, "it is nested 20[01] deep, and at most 64"),
        ("bandwidth = " + "{a = " * 200 + "1" + "}" * 200, "it is nested 20[01] deep, and at most 64"),
        (".".join("a" * 500) + " = 1", "it is nested 500 deep, and at most 64"),
        ('bandwidth = {value = 4, unit = "TB/s", source = "paper", speed = 1}', "has speed"),
        ('bandwidth = {value = 4, unit = "TB/s", source = "assumed"}', "memory.bandwidth is assumed: add a note"),
    ],
)
def test_a_number_without_unit_or_source_is_refused(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'name = "odd"\n[memory]\n{line}\n')
    with pytest.raises(ValueError, match=message):
        load_machine(path)


@pytest.mark.parametrize(("limit", "expected"), [("max", 4096_000), ("3000000", 2_000_000), ("99999999999", 4096_000)])
def test_available_memory_heeds_the_containers_limit(tmp_path, limit: str, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_available_memory_of_this_machine_is_plausible(tmp_path) -> None:
    assert 0 < available_memory_bytes() < 1 << 50
    assert 0 < available_memory_bytes(tmp_path / "nothing", tmp_path / "nothing") < 1 << 50


def test_all_implausible_values_of_a_file_are_told_at_once(tmp_path) -> None:
    """Wrong units give values outside of the plausible range, and rates must not exceed the datasheet's."""
    text = files("weft.hw").joinpath("h200.toml").read_text()
    for right, wrong in (
        ('value = 395\nunit = "GB/s"', 'value = 395\nunit = "TB/s"'),
        ('value = 989\nunit = "TFLOP/s"', 'value = 79000\nunit = "TFLOP/s"'),
        ('value = 4.27\nunit = "TB/s"', 'value = 5.27\nunit = "TB/s"'),
        ('value = 132\nunit = "1"', 'value = 13200\nunit = "1"'),
    ):
        assert right in text
        text = text.replace(right, wrong)
    path = tmp_path / "mine.toml"
    path.write_text(text + '\n[memory.chanels]\nvalue = 3\nunit = "1"\nsource = "paper"\n')
    with pytest.raises(ValueError, match=r"mine\.toml: memory\.chanels is not a known key") as error:
        load_machine(path)
    for message in (
        "link.port_usable = 395 TB/s is implausible: give 0.05 to 4000 GB/s",
        "compute.bf16_dense = 79000 TFLOP/s is implausible: give 0.1 to 20000 TFLOP/s",
        "memory.copy_bandwidth = 5.27 TB/s is implausible: it exceeds memory.bandwidth = 4.8 TB/s",
        "compute.multiprocessors = 13200 is implausible: give 4 to 2048",
    ):
        assert message in str(error.value)
