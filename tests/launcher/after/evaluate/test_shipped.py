"""A checkpoint sent to another machine is the same model there, written once by whichever process is first."""

import json
import threading
from pathlib import Path

from launcher.after.evaluate.model import pack, unpack
from launcher.after.finetune.pretrained import LocalModel, folder_digest


def folder_with_modules(folder: Path) -> Path:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "runs").mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "optimizer.pt").write_bytes(b"x" * 1000)
    (folder / "runs/events").write_bytes(b"x")
    return folder


def test_what_arrives_has_the_same_digest_and_nothing_beside_the_model(tmp_path: Path) -> None:
    folder = folder_with_modules(tmp_path / "here")
    sent = pack(LocalModel("here", None, folder, folder_digest(folder)))
    arrived: list[LocalModel] = []
    threads = [
        threading.Thread(target=lambda: arrived.append(unpack(sent, tmp_path / "there"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(arrived) == 4
    assert len({one.folder for one in arrived}) == 1
    there = arrived[0].folder
    assert folder_digest(there) == arrived[0].digest
    assert [path.name for path in (tmp_path / "there").iterdir()] == [arrived[0].digest]
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"}
