"""Notes on the papers' protocols: open points, contradictions, and differences of ours.

Each text is a sentence or two for `medfedaug.experiments.presets.Preset.readings`; they are shown with
``medfedaug benchmark --list NAME``, below every table and on the page.
"""

from __future__ import annotations

SELECTION = (
    "The model with the best mean validation score is tested; the paper does not say which model it tests."
)
UNIFORM = "All sites have the same weight in the average (FedFA+ Eq. 1)."
SLICES = (
    "The published order of slices puts slices of one patient into training and test: use it for comparison "
    "with the paper only."
)
PATIENTS = (
    "Data are split by patient and scored by volume, so that scores cannot be compared with the paper's."
)
SCRATCH = (
    "The network starts from random weights; the paper's starts from weights pre-trained on ImageNet, which "
    "are not shipped. Expect lower scores than the paper's."
)
STEM = (
    "ResNet-18 begins with a 3 x 3 convolution of stride 1 and without pooling, as in the public code of the "
    "work that the paper follows here; the paper does not say."
)

_FLIPS = (
    "Training images are mirrored and rotated by up to 30 degrees, as in appendix E.2 of FedFA; FedFA+ does "
    "not say so, and the public code of FedFA does neither for Office-Caltech 10 (--set augmentation=none)."
)
_U_NET = (
    "The U-Net is MONAI's BasicUNet with the paper's widths and ReLU. It has 7.78 million parameters, the "
    "paper's has 7.76: its last transposed convolution is wider, and convolutions have a bias."
)
_INTENSITIES = "Volumes are clipped at their 99 % quantile, as in HarmoFL's code; the papers do not say."
_SELECTION_FEDRDN = (
    "The model with the best mean validation score is tested; the paper's public code chooses the model by "
    "its test score."
)
_DOMAINBED = (
    "80 % of each site's images train, as in DomainBed. DomainBed chooses the model with the other 20 %; "
    "here half of them do so, and the other half test the sites that train."
)

LEFT_OUT = (
    "A site that is left out is scored with the average of the layers that FedBN's and SiloBN's sites keep "
    "(unseen=average), as FedFD-A does; the other papers do not say with which."
)

FEDFA = (UNIFORM, _FLIPS, LEFT_OUT, SELECTION)
FEDFA_PROSTATE = (
    UNIFORM,
    LEFT_OUT,
    _U_NET,
    "The weight decay of 1e-4 is from appendix E.3 of FedFA; FedFA+ does not say.",
    _INTENSITIES,
    SELECTION,
)
NO_AUGMENTATION = "No augmentation and no weight decay: the paper names none for these data."
SKEW = (
    UNIFORM,
    STEM,
    NO_AUGMENTATION,
    "A tenth of each site's images are for validation; the paper has no validation images here.",
    SELECTION,
)
FEDRDN = (
    "Sites are weighted by their number of training images (FedRDN Eq. 1).",
    'The paper\'s "basic data augmentation techniques like random flipping" are read as the flips and '
    "rotations of FedFA, on whose protocol it builds.",
    "Images have 256 x 256 pixels, as in that protocol; the paper does not say.",
    _SELECTION_FEDRDN,
)
FEDRDN_PROSTATE = (
    "Sites are weighted by their number of training samples (FedRDN Eq. 1).",
    "The loss is Dice plus cross-entropy; the paper's is Dice alone.",
    "The paper's basic augmentation is read as flips.",
    _U_NET,
    _INTENSITIES,
    _SELECTION_FEDRDN,
)
_FEDFD_A = (
    _DOMAINBED,
    "FedProx has μ = 0.1 as in the ablation of Section 4.2; for the other tables the paper does not say.",
    "No weight decay: the paper names none.",
    "A site sends its model after 200 steps; in the paper it sends the best of every 20 steps on its "
    "validation images.",
    "The held-out site is tested with all its images.",
    LEFT_OUT,
)
FEDFD_A = (
    SCRATCH,
    "Images have 224 x 224 pixels and are mirrored; the paper refers to DomainBed, which also crops images, "
    "jitters colours and makes some images grey.",
    *_FEDFD_A,
)
FEDFD_A_DOMAINNET = (
    "Images have 256 x 256 pixels and are mirrored, and the network starts from random weights; the paper "
    "does not say.",
    *_FEDFD_A,
)
FRAUG = (
    "Rounds, epochs, batch size, learning rate, image size and augmentation are in an appendix that is not "
    "part of the paper's text; used are 100 rounds of one epoch, batches of 32 and SGD at 0.01.",
    "The paper's share of data is taken of all images of a site (of Digits, of the published training "
    "images), evenly from each list. Validation and test images are all used; the paper does not say.",
    "All sites have the same weight in the average (FRAug Algorithm 1).",
)
RETINA = (
    "Photographs of one size on their longer side are resized to 256 x 256 pixels for the network, whatever "
    "their shape, and its logits back to each photograph's own pixels, where Dice is taken.",
    "All methods see the colours divided by 255. AVWIDE has no blue: where a method normalises, that channel "
    "is 0 there.",
    "Cases are weighted alike: both eyes of a child in CHASEDB1 are two cases of one patient, who is in one "
    "split.",
)
