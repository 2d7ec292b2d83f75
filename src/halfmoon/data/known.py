"""Public data sets that are known by name: what is known of them before their files are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """What is known of a public data set before its files are read.

    `hub`, `config`: its Hugging Face repository and, where that holds several sets, which; `classes` in the order of
    the labels; `mean`, `std`: one number a channel, of the training pixels in 0..1; `train`, `test`: numbers of
    images; `shape`: (height, width, channels) of an image; `files`: its official files in words; `folder`: where
    its official archive puts them; `held`: what the hub calls the part that evaluates; `gray`: some images are gray
    and are made RGB; `mirror`: a mirrored image is still of its class.
    """

    about: str
    hub: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: int
    test: int
    shape: tuple[int, int, int]
    files: str
    folder: str | None = None
    config: str | None = None
    held: str = "test"
    gray: bool = False
    mirror: bool = True


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
"""CIFAR-100's fine names in the order of its fine_label_names.txt."""
WNIDS = """
n01443537 n01629819 n01641577 n01644900 n01698640 n01742172 n01768244 n01770393 n01774384 n01774750 n01784675
n01855672 n01882714 n01910747 n01917289 n01944390 n01945685 n01950731 n01983481 n01984695 n02002724 n02056570
n02058221 n02074367 n02085620 n02094433 n02099601 n02099712 n02106662 n02113799 n02123045 n02123394 n02124075
n02125311 n02129165 n02132136 n02165456 n02190166 n02206856 n02226429 n02231487 n02233338 n02236044 n02268443
n02279972 n02281406 n02321529 n02364673 n02395406 n02403003 n02410509 n02415577 n02423022 n02437312 n02480495
n02481823 n02486410 n02504458 n02509815 n02666196 n02669723 n02699494 n02730930 n02769748 n02788148 n02791270
n02793495 n02795169 n02802426 n02808440 n02814533 n02814860 n02815834 n02823428 n02837789 n02841315 n02843684
n02883205 n02892201 n02906734 n02909870 n02917067 n02927161 n02948072 n02950826 n02963159 n02977058 n02988304
n02999410 n03014705 n03026506 n03042490 n03085013 n03089624 n03100240 n03126707 n03160309 n03179701 n03201208
n03250847 n03255030 n03355925 n03388043 n03393912 n03400231 n03404251 n03424325 n03444034 n03447447 n03544143
n03584254 n03599486 n03617480 n03637318 n03649909 n03662601 n03670208 n03706229 n03733131 n03763968 n03770439
n03796401 n03804744 n03814639 n03837869 n03838899 n03854065 n03891332 n03902125 n03930313 n03937543 n03970156
n03976657 n03977966 n03980874 n03983396 n03992509 n04008634 n04023962 n04067472 n04070727 n04074963 n04099969
n04118538 n04133789 n04146614 n04149813 n04179913 n04251144 n04254777 n04259630 n04265275 n04275548 n04285008
n04311004 n04328186 n04356056 n04366367 n04371430 n04376876 n04398044 n04399382 n04417672 n04456115 n04465501
n04486054 n04487081 n04501370 n04507155 n04532106 n04532670 n04540053 n04560804 n04562935 n04596742 n04597913
n06596364 n07579787 n07583066 n07614500 n07615774 n07695742 n07711569 n07715103 n07720875 n07734744 n07747607
n07749582 n07753592 n07768694 n07871810 n07873807 n07875152 n07920052 n09193705 n09246464 n09256479 n09332890
n09428293 n12267677
"""
"""The WordNet ids of Tiny ImageNet's classes, sorted as its folders are."""

KNOWN: Mapping[str, Known] = {
    "cifar10": Known(
        "50,000 + 10,000 color images, 32x32, 10 classes (Krizhevsky 2009); binary files, parquet, folders or hub",
        hub="uoft-cs/cifar10",
        classes=CIFAR10,
        mean=(0.49139968, 0.48215827, 0.44653124),
        std=(0.24703233, 0.24348505, 0.26158768),
        train=50_000,
        test=10_000,
        shape=(32, 32, 3),
        files="data_batch_1.bin to data_batch_5.bin and test_batch.bin",
        folder="cifar-10-batches-bin",
    ),
    "cifar100": Known(
        "50,000 + 10,000 color images, 32x32, 100 classes (Krizhevsky 2009); binary files, parquet, folders or hub",
        hub="uoft-cs/cifar100",
        classes=tuple(FINE.split()),
        mean=(0.50707516, 0.48654887, 0.44091784),
        std=(0.26733429, 0.25643846, 0.27615047),
        train=50_000,
        test=10_000,
        shape=(32, 32, 3),
        files="train.bin and test.bin",
        folder="cifar-100-binary",
    ),
    "svhn": Known(
        "73,257 + 26,032 color images, 32x32, 10 classes (Netzer 2011, cropped digits); parquet or hub",
        hub="ufldl-stanford/svhn",
        classes=tuple("0123456789"),
        mean=(0.4376821, 0.4437697, 0.47280442),
        std=(0.19803012, 0.20101562, 0.19703614),
        train=73_257,
        test=26_032,
        shape=(32, 32, 3),
        files="cropped_digits of ufldl-stanford/svhn on the hub",
        config="cropped_digits",
        mirror=False,
    ),
    "cinic10": Known(
        "90,000 + 90,000 color images, 32x32, 10 classes (Darlow 2018); class folders, parquet or hub",
        hub="flwrlabs/cinic10",
        classes=CIFAR10,
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
        train=90_000,
        test=90_000,
        shape=(32, 32, 3),
        files="train/CLASS/*.png and test/CLASS/*.png",
        folder="CINIC-10",
        gray=True,
    ),
    "fashion_mnist": Known(
        "60,000 + 10,000 gray images, 28x28, 10 classes (Zalando 2017); four idx files, parquet or hub",
        hub="zalando-datasets/fashion_mnist",
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        mean=(0.2860,),
        std=(0.3530,),
        train=60_000,
        test=10_000,
        shape=(28, 28, 1),
        files="train-images-idx3-ubyte.gz and the three other idx files",
    ),
    "tiny_imagenet": Known(
        "100,000 + 10,000 color images, 64x64, 200 classes (Stanford CS231n); its official folders, parquet or hub",
        hub="zh-plus/tiny-imagenet",
        classes=tuple(WNIDS.split()),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        train=100_000,
        test=10_000,
        shape=(64, 64, 3),
        files="train/WNID/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt",
        folder="tiny-imagenet-200",
        held="valid",
        gray=True,
    ),
}
