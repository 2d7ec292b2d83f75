"""A folder as somebody has it: photographs of CIFAR-10 enlarged to 224x224 JPEGs, in a folder for each class.

    python results/own_images.py --data-dir DATA --out photos [--images 3000]
    halfmoon run --data photos

The first line makes the folder, the second is all that its owner types. results/own_images.md shows what it prints.
"""

import argparse
from pathlib import Path

from PIL import Image

import halfmoon

SIDE = 224
QUALITY = 92


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--parts", action="store_true", help="every fifth in test/CLASS, the others in train/CLASS")
    options = parser.parse_args()
    source = halfmoon.load_data("cifar10", options.data_dir)
    left = {name: options.images // len(source.classes) for name in source.classes}
    for number, (pixels, label) in enumerate(zip(source.train.images, source.train.labels, strict=True)):
        name = source.classes[label]
        if not left[name]:
            continue
        left[name] -= 1
        part = options.out / ("train" if left[name] % 5 else "test") if options.parts else options.out
        path = part / name / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=QUALITY)


if __name__ == "__main__":
    main()
