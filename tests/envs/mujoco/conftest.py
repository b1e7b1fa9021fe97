"""Plain MuJoCo, one `MjData` per simulation, as the reference in tests of `Physics`."""

from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class BareSimulations:
    """The reference implementation of `Physics`."""

    def __init__(self, model, num_sims):
        self.model = model
        self.datas = [mujoco.MjData(model) for _ in range(num_sims)]

    def bind(self, field):
        return np.array([getattr(data, field) for data in self.datas])

    def set_state(self, qpos, qvel, mask=None):
        for data, positions, velocities in zip(self._chosen(mask), qpos, qvel, strict=True):
            mujoco.mj_resetData(self.model, data)
            data.qpos[:], data.qvel[:] = positions, velocities
            mujoco.mj_forward(self.model, data)

    def step(self, controls, num_substeps, mask=None):
        chosen = np.ones(len(self.datas), bool) if mask is None else mask
        for data, control, step in zip(self.datas, controls, chosen, strict=True):
            if step:
                data.ctrl[:] = control
                for _ in range(num_substeps):
                    mujoco.mj_step(self.model, data)

    def forward(self, mask=None):
        for data in self._chosen(mask):
            mujoco.mj_forward(self.model, data)

    def _chosen(self, mask):
        return self.datas if mask is None else [data for data, step in zip(self.datas, mask, strict=True) if step]


@pytest.fixture
def bare_simulations():
    return BareSimulations


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    """A working folder for the files that MuJoCo may log."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def ordinary_model(tmp_path_factory):
    """Return MuJoCo's model of a file that ships with Gymnasium, and ignore the warnings."""

    def load(xml_name):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("log"))
            return mujoco.MjModel.from_xml_path(str(ASSETS / xml_name))

    return load


@pytest.fixture(params=["mjbatch", "mujoco"])
def engine(request):
    if request.param == "mjbatch":
        pytest.importorskip("mjbatch", exc_type=ImportError)
    return request.param
