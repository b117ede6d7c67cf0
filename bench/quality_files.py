"""A checkpoint quantised by published packages, a directory a recipe (runs in an environment that has them).

    python -m bench.quality_files CHECKPOINT CALIBRATION OUT RECIPE,...

CALIBRATION is JSON: lists of token ids, all of one length. Beside the directories comes OUT/RECIPE.json: what
made it. A recipe that fails says why there and fails no other. llmcompressor, auto-round, nvidia-modelopt and
autoawq (--no-deps) fit into one environment; gptqmodel asks for another transformers.

The built-in model's down projections have 448 columns, which are no whole groups of 128: those have groups of
64. in_proj_a and in_proj_b, of two rows each, and the tied head stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it counts one, and then asks for two

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

Ids = list[list[int]]
Recipe = Callable[[Path, Ids, Path], None]

KEPT = ("lm_head", "re:.*in_proj_[ab]$")
DOWN = "re:.*down_proj$"


def loaded(source: Path) -> Any:
    """The model in bfloat16, as these packages' documents load one."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


# llm-compressor


def compressed(source: Path, ids: Ids, out: Path, scheme: str, by: str = "nearest", down: int | None = None) -> None:
    """llm-compressor's scheme of this name, by its modifier. down: the group of down projections."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    groups: dict[str, QuantizationScheme] = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    if down is not None:
        groups = {"group_1": preset_name_to_scheme(scheme, [DOWN])} | groups
        groups["group_1"].weights.group_size = down
        groups["group_0"].targets = [r"re:.*(gate_proj|up_proj|[qkvo]_proj|in_proj_qkv|in_proj_z|out_proj)$"]
    modifier = {"nearest": QuantizationModifier, "gptq": GPTQModifier}[by]
    recipe = [modifier(config_groups=groups, ignore=list(KEPT))]
    model = loaded(source)
    data = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    oneshot(
        model=model,
        recipe=recipe,
        **({} if by == "nearest" else {"dataset": Dataset.from_dict(data), "num_calibration_samples": len(ids)}),
    )
    model.save_pretrained(out, save_compressed=True)


# auto-round


def rounded(source: Path, ids: Ids, out: Path, format: str, symmetric: bool = True, bits: int = 4) -> None:
    """auto-round by the nearest code, in one of the layouts that it writes.

    Its modes that calibrate hand this family's attention a mask of integers, which torch refuses.
    """
    from auto_round import AutoRound

    layers = {f"model.layers.{i}.mlp.down_proj": {"group_size": 64, "bits": bits} for i in range(8)}
    layers |= {f"model.layers.{i}.linear_attn.in_proj_{x}": {"bits": 16} for i in range(8) for x in "ab" if i % 4 != 3}
    model = AutoRound(
        loaded(source),
        AutoTokenizer.from_pretrained(source),
        scheme={"bits": bits, "group_size": 128, "sym": symmetric, "data_type": "int", "act_bits": 16},
        layer_config=layers,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        enable_torch_compile=False,
    )
    model.quantize_and_save(str(out), format=format)
    for folder in [path for path in out.iterdir() if path.is_dir()]:  # it names one after the model
        shutil.copytree(folder, out, dirs_exist_ok=True)
        shutil.rmtree(folder)


# AutoAWQ


def awq(source: Path, ids: Ids, out: Path) -> None:
    """AutoAWQ's rounding and packing, in groups of 64; its search for scales does not know this family."""
    from awq.quantize.quantizer import AwqQuantizer

    quantizer = object.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point, quantizer.version = 4, 64, True, "gemm"
    model = loaded(source)
    for layer in model.model.layers:
        linears = {name: each for name, each in layer.named_modules() if isinstance(each, torch.nn.Linear)}
        quantizer._apply_quant(layer, {name: each for name, each in linears.items() if each.out_features > 2})
    said = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    model.config.quantization_config = said
    model.config.save_pretrained(out)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


# GPTQModel


def gptq(source: Path, ids: Ids, out: Path, bits: int = 4, symmetric: bool = True, method: str = "gptq") -> None:
    """GPTQModel's own GPTQ or AWQ; groups of 64 everywhere, since it takes one for all."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=bits, group_size=64, sym=symmetric, desc_act=False, quant_method=method, device="cpu")
    model = GPTQModel.load(str(source), config)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids], batch_size=4)
    model.save(str(out))


# nvidia-modelopt


def modelopt(source: Path, ids: Ids, out: Path, name: str) -> None:
    """ModelOpt's configuration of this name, by the nearest code; its export for Hugging Face."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(getattr(mtq, name))
    off = [{"quantizer_name": f"*{part}*", "enable": False} for part in ("in_proj_a", "in_proj_b", "lm_head")]
    config["quant_cfg"] = [*config["quant_cfg"], *off]
    model = loaded(source)
    mtq.quantize(model, config, lambda each: [each(torch.tensor([row])) for row in ids[:16]])
    export_hf_checkpoint(model, export_dir=str(out))


RECIPES: dict[str, tuple[Recipe, str, str]] = {
    "ct-fp8-block": (partial(compressed, scheme="FP8_BLOCK"), "llmcompressor", "nearest"),
    "ct-fp8-channel": (partial(compressed, scheme="FP8_DYNAMIC"), "llmcompressor", "nearest"),
    "ct-int8-channel": (partial(compressed, scheme="W8A8"), "llmcompressor", "nearest"),
    "ct-int8-packed": (partial(compressed, scheme="W8A16", down=64), "llmcompressor", "nearest"),
    "ct-int4": (partial(compressed, scheme="W4A16", down=64), "llmcompressor", "nearest"),
    "ct-int4-gptq": (partial(compressed, scheme="W4A16", by="gptq", down=64), "llmcompressor", "GPTQ"),
    "ct-int4-zeros": (partial(compressed, scheme="W4A16_ASYM", down=64), "llmcompressor", "nearest"),
    "ct-int4-zeros-gptq": (partial(compressed, scheme="W4A16_ASYM", by="gptq", down=64), "llmcompressor", "GPTQ"),
    "ct-nvfp4": (partial(compressed, scheme="NVFP4A16"), "llmcompressor", "nearest"),
    "ct-mxfp4": (partial(compressed, scheme="MXFP4A16"), "llmcompressor", "nearest"),
    "auto-round": (partial(rounded, format="auto_round"), "auto-round", "nearest"),
    "auto-round-gptq": (partial(rounded, format="auto_gptq"), "auto-round", "nearest"),
    "auto-round-int8": (partial(rounded, format="auto_round", bits=8), "auto-round", "nearest"),
    "auto-round-awq": (partial(rounded, format="auto_awq", symmetric=False), "auto-round", "nearest"),
    "autoawq": (awq, "autoawq", "nearest"),
    "gptq-int4": (gptq, "gptqmodel", "GPTQ"),
    "gptq-int8": (partial(gptq, bits=8), "gptqmodel", "GPTQ"),
    "gptq-awq": (partial(gptq, symmetric=False, method="awq"), "gptqmodel", "AWQ"),
    "modelopt-fp8": (partial(modelopt, name="FP8_DEFAULT_CFG"), "nvidia-modelopt", "nearest"),
    "modelopt-nvfp4": (partial(modelopt, name="NVFP4_DEFAULT_CFG"), "nvidia-modelopt", "nearest"),
    "modelopt-mxfp4": (partial(modelopt, name="MXFP4_DEFAULT_CFG"), "nvidia-modelopt", "nearest"),
}
"""By name: what makes it, the package, and its algorithm."""


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[3])
    ids: Ids = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(2)
    for name in sys.argv[4].split(","):
        make, package, how = RECIPES[name]
        shutil.rmtree(out / name, ignore_errors=True)
        torch.manual_seed(0)
        said: dict[str, str] = {"by": f"{package} {version(package)}", "how": how}
        try:
            make(source, ids, out / name)
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
            shutil.rmtree(out / name, ignore_errors=True)
        else:
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(source / file, out / name)  # not all packages write them
        (out / f"{name}.json").write_text(json.dumps(said))
        print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    main()
