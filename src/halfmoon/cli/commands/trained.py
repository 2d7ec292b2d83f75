"""Commands that use a trained model: predict, evaluate, review, calibrate, export."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    add_command,
    event_printer,
    exit_on_interrupt,
    print_json,
    print_table,
    print_text,
    print_warning,
)
from halfmoon.cli.commands.paged import (
    add_device_flag,
    add_network_flag,
    add_page_flags,
    check_network_flag,
    model_loader,
    parse_page_port,
)
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError, escape_name
from halfmoon.storage.output_paths import check_output_file, check_output_folder

if TYPE_CHECKING:
    from halfmoon.sites.inference.image_folder import UnreadableImage

DEFAULT_TABLE = Path("predictions.csv")
"""The file of predictions."""

MAX_MATRIX_CLASSES = 12
"""The most classes whose confusion matrix is printed."""


def add(commands: Any) -> None:
    """Add the parsers of the commands."""
    parser = add_command(
        commands, "predict", "label the images of a folder with a trained model", "MODEL FOLDER ", _predict
    )
    _add_model_argument(parser)
    add_device_flag(parser)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images of any size, also in folders below it")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=DEFAULT_TABLE, help=f"the table (default: {DEFAULT_TABLE})"
    )
    about = (
        "images like those the model was trained on: mark images of FOLDER that differ from them, and warn if many do"
    )
    parser.add_argument("--like", metavar="DIR", type=Path, help=about)
    _add_confidence_flag(parser)

    about = "measure a trained model on labeled images"
    parser = add_command(commands, "evaluate", about, "MODEL FOLDER ", _evaluate)
    _add_model_argument(parser)
    add_device_flag(parser)
    about = "a folder for each class, or images with a labels.csv (path,label)"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    about = "also write evaluation.json, classes.csv, confusion.csv, reliability.csv and reliability.png there"
    parser.add_argument("--out", metavar="DIR", type=Path, help=about)
    _add_confidence_flag(parser)

    about = "check a model's predictions in the browser, and correct labels"
    parser = add_command(commands, "review", about, "MODEL FOLDER ", _review)
    _add_model_argument(parser)
    about = "images, optionally with a labels.csv or a folder for each class"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    add_device_flag(parser)
    add_page_flags(parser)

    about = "calibrate a trained model on labeled images that it was not trained on"
    parser = add_command(commands, "calibrate", about, "MODEL FOLDER ", _calibrate)
    _add_model_argument(parser)
    add_device_flag(parser)
    about = "validation images: a folder for each class, or images with a labels.csv (path,label)"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)

    parser = add_command(commands, "export", "write a trained model for other programs", "MODEL ", _export)
    _add_model_argument(parser)
    parser.add_argument("--onnx", metavar="FILE", type=Path, help="an ONNX file (needs the extra onnx)")
    parser.add_argument("--torch", metavar="FILE", type=Path, help="a program of torch.export (.pt2)")
    about = "a folder of images on which the files are compared with the model, in addition to random images"
    parser.add_argument("--images", metavar="FOLDER", type=Path, help=about)


def _add_model_argument(parser: argparse.ArgumentParser) -> None:
    about = "the folder of a finished run, or its model.safetensors"
    parser.add_argument("model", metavar="MODEL", type=Path, help=about)
    add_network_flag(parser)


def _add_confidence_flag(parser: argparse.ArgumentParser) -> None:
    about = "probability from which a label counts as confident (default: 0.9)"
    parser.add_argument("--sure", metavar="X", type=float, default=0.9, help=about)


def _report_unreadable(unreadable: Sequence[UnreadableImage]) -> int:
    """Print a warning for each image that could not be read; return the exit code, 1 if there is one."""
    for each in unreadable:
        print_warning(f"{escape_name(each.path)}: {each.reason}", 1)
    if not unreadable:
        return 0
    return print_warning(f"{len(unreadable)} image(s) could not be read; the results are for the others.", 1)


def _report_left_out(folder: Path, classes: Sequence[str] | None = None) -> None:
    """Print a warning for each kind of image in a folder that a command does not use.

    Args:
        folder: the folder of images.
        classes: the classes of a model, for a command that uses labeled images only; None if it uses all images.
    """
    from halfmoon.sites.inference.image_folder import describe_unused_images

    for note in describe_unused_images(folder, classes):
        print_warning(f"{folder}: left out: {note}.")


def _predict(args: argparse.Namespace) -> int:
    """Run `halfmoon predict`: write the predicted labels of a folder's images to a table.

    With `--like FOLDER`, images that differ from those of that folder, on which the model may be wrong, are marked.
    """
    from halfmoon.sites.inference.image_folder import predict_folder

    check_output_file(args.out, "out", makes_folder=True)
    model = model_loader(args.model, args.device, args.network)()
    reference = None
    if args.like is not None:
        from halfmoon.sites.inference import outliers

        reference = outliers.build_reference(model, args.like)
    find_outliers = None if reference is None else reference.find_outliers
    result = predict_folder(model, args.folder, args.out, args.sure, find_outliers)
    _report_left_out(args.folder)
    if reference is not None and outliers.too_many_outliers(result.outliers, result.images):
        print_warning(
            f"{result.outliers:,} of {result.images:,} images differ from those of {args.like} "
            f"({outliers.EXPECTED_OUTLIER_SHARE:.0%} of those images do): do not rely on their labels.",
            code=0,
        )
    if args.json:
        fields = {"out": str(result.out), "images": result.images, "sure": args.sure, "unsure": result.below_confidence}
        if reference is not None:
            fields["unlike"] = result.outliers
        unreadable = [image._asdict() for image in result.unreadable]
        print_json({**fields, "labels": result.labels, "unreadable": unreadable})
    else:
        print_table(["label", "images"], [[name, f"{count:,}"] for name, count in result.labels.items()])
        print_text(f"unsure, below {args.sure:g}: {result.below_confidence:,} of {result.images:,} images")
        if reference is not None:
            print_text(f"unlike those of {args.like}: {result.outliers:,}")
        print_text(f"table: {result.out}", wrap=False)
    return _report_unreadable(result.unreadable)


def _evaluate(args: argparse.Namespace) -> int:
    """Run `evaluate`: measure a model on a folder of labeled images."""
    from halfmoon.sites.inference.measure import TRAINING_IMAGES_WARNING, evaluate_folder, write_evaluation

    if args.out is not None:
        check_output_folder(args.out, "out")
    model = model_loader(args.model, args.device, args.network)()
    result, unreadable = evaluate_folder(model, args.folder, args.sure)
    _report_left_out(args.folder, model.classes)
    result["temperature"] = model.card.temperature
    files = []
    if args.out is not None:
        files = [str(path) for path in write_evaluation(result, unreadable, args.out)]
        from halfmoon.report.diagrams import draw_reliability  # Matplotlib is slow to import

        diagram = args.out / "reliability.png"
        draw_reliability(result, diagram)
        files.append(str(diagram))
    if args.json:
        print_json({**result, "unreadable": [image._asdict() for image in unreadable], "files": files})
    else:
        _print_metrics(result, files)
    if result["training_images"]:
        count = result["training_image_count"]
        images = f"({count:,} of {result['images']:,}) " if count else ""
        print_warning(f"{args.folder} {images}{TRAINING_IMAGES_WARNING}", 0)
    return _report_unreadable(unreadable)


def _print_metrics(result: dict[str, Any], files: Sequence[str]) -> None:
    """Print the metrics of an evaluation as tables and lines.

    Args:
        result: the metrics, from `evaluate_folder`.
        files: the files that were written.
    """
    rows = []
    for metrics in result["per_class"]:
        percentages = [_percent(metrics[name]) for name in ("precision", "recall", "f1")]
        rows.append([metrics["class"], *percentages, f"{metrics['support']:,}"])
    print_table(["class", "precision %", "recall %", "F1 %", "images"], rows)
    if len(result["classes"]) <= MAX_MATRIX_CLASSES:
        print_text("\nconfusion (rows: true class, columns: predicted class)")
        matrix = zip(result["classes"], result["confusion"], strict=True)
        print_table(["", *result["classes"]], [[name, *map(str, row)] for name, row in matrix])
    print_text("\nreliability (images by the probability of their label)")
    rows = [
        [
            f"{interval['above']:.3f} to {interval['to']:.3f}",
            f"{interval['images']:,}",
            _percent(interval["confidence"]),
            _percent(interval["accuracy"]),
        ]
        for interval in result["reliability"]
        if interval["images"]
    ]
    print_table(["probability", "images", "mean probability %", "accuracy %"], rows)
    confident = result["sure"]
    confident_accuracy = ""
    if confident["share"]:
        confident_accuracy = f", accuracy among them: {_percent(confident['accuracy'])} %"
    lines = [
        "",
        f"images: {result['images']:,}",
        f"accuracy: {_percent(result['accuracy'])} %",
        f"balanced accuracy: {_percent(result['balanced_accuracy'])} %",
        f"area under the ROC curve: {_percent(result['auc'])} %",
        f"expected calibration error: {_percent(result['calibration_error'])} % "
        f"(temperature {result['temperature']:.3g})",
        f"sure, from {confident['at_least']:g}: {_percent(confident['share'])} % of the images{confident_accuracy}",
        *(f"written: {file}" for file in files),
    ]
    print_text("\n".join(lines))


def _percent(share: float | None) -> str:
    """Format a share in percent with two decimals; `-` for None."""
    return "-" if share is None else f"{100 * share:.2f}"


MAX_EXAMINED_IMAGES = 500
"""Images of which `halfmoon review` checks whether the model was trained on them, before the page opens."""


def _review(args: argparse.Namespace) -> int:
    """Run `review`: serve a page with the predictions for a folder's images."""
    from halfmoon.pages.review import serve_review_page as review
    from halfmoon.sites.inference.image_folder import list_images
    from halfmoon.sites.inference.measure import TRAINING_IMAGES_WARNING, count_training_images

    port = parse_page_port(args)
    model = model_loader(args.model, args.device, args.network)()
    paths = list_images(args.folder)
    # Examine at most `MAX_EXAMINED_IMAGES`, evenly spaced.
    step = math.ceil(len(paths) / MAX_EXAMINED_IMAGES)
    sample = paths[::step]
    _report_left_out(args.folder)
    if count := count_training_images(model, args.folder, sample):
        print_warning(f"{args.folder} ({count:,} of {len(sample):,} examined) {TRAINING_IMAGES_WARNING}", 0)
    with exit_on_interrupt("the page is closed."):
        review(model, args.model.resolve().name, args.folder, port, not args.no_browser, event_printer(False))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    """Run `halfmoon calibrate`: fit the temperature of a model, which divides its logits, on a folder of labeled images.

    A fitted temperature makes the model's probabilities match its accuracy. It is written into the model's file, and the
    calibration errors with the previous and with the new temperature are printed.
    """
    from halfmoon.runs.factory import select_device
    from halfmoon.sites.inference.measure import calibrate_model

    check_network_flag(args.network)
    torch_device = select_device(settings.Config(device=settings.parse_option("device", args.device)))
    result = calibrate_model(args.model, args.folder, str(torch_device), args.network)
    _report_left_out(args.folder, result.classes)
    if args.json:
        print_json(
            {
                "model": str(result.model),
                "images": result.images,
                "before": asdict(result.before),
                "after": asdict(result.after),
                "unreadable": [image._asdict() for image in result.unreadable],
            }
        )
    else:
        rows = [
            [name, f"{fit.temperature:.3f}", f"{100 * fit.calibration_error:.2f}", f"{fit.loss:.4f}"]
            for name, fit in (("before", result.before), ("after", result.after))
        ]
        print_table(["", "temperature", "calibration error %", "cross-entropy"], rows)
        note = f"measured on the {result.images:,} images of the fit; measure others with halfmoon evaluate"
        print_text(f"{note}\nwritten: {result.model}")
    return _report_unreadable(result.unreadable)


def _export(args: argparse.Namespace) -> int:
    """Run `export`: write a model as an ONNX file or a torch.export program, compared with the model."""
    if args.onnx is None and args.torch is None:
        raise UserError("no file is given: give {onnx=FILE}, {torch=FILE} or both.", option=("onnx", "torch"))
    for option, path in (("onnx", args.onnx), ("torch", args.torch)):
        if path is not None:
            check_output_file(path, option)
    from halfmoon.sites.inference import load_model
    from halfmoon.sites.inference.export import export_onnx, export_torch, real_images

    check_network_flag(args.network)
    model = load_model(args.model, network=args.network)
    images = real_images(model, args.images)
    exported_files = {}
    if args.onnx is not None:
        exported_files["onnx"] = export_onnx(model, args.onnx, images)
    if args.torch is not None:
        exported_files["torch"] = export_torch(model, args.torch, images)
    if args.json:
        fields = {
            name: {"path": str(file.path), "images": file.images, "difference": file.difference}
            for name, file in exported_files.items()
        }
        print_json(fields)
        return 0
    for name, file in exported_files.items():
        comparison = (
            f"compared on {file.images} images, the largest difference of a probability is {file.difference:.1e}"
        )
        print_text(f"{name}: {file.path} ({comparison})")
    return 0
