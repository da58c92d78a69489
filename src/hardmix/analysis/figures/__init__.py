"""One function per figure: numbers in, a `Picture` out. `save` writes SVG, PNG and JSON."""

from hardmix.analysis.figures.fig2 import (
    Histogram,
    Line,
    Ranks,
    fig2a,
    fig2b,
    fig2c,
    similarity_histograms,
)
from hardmix.analysis.figures.fig3 import Cell, Place, fig3a, fig3b, fig3c
from hardmix.analysis.figures.image_sheet import Neighbour, Parents, Query, gallery
from hardmix.analysis.figures.maps import Group, MapPoints, embedding_map, feature_spectrum, fig1
from hardmix.analysis.figures.picture import Picture, check_installed, load, png, save, svg

__all__ = [
    "Cell",
    "Group",
    "Histogram",
    "Line",
    "MapPoints",
    "Neighbour",
    "Parents",
    "Picture",
    "Place",
    "Query",
    "Ranks",
    "check_installed",
    "embedding_map",
    "feature_spectrum",
    "fig1",
    "fig2a",
    "fig2b",
    "fig2c",
    "fig3a",
    "fig3b",
    "fig3c",
    "gallery",
    "load",
    "png",
    "save",
    "similarity_histograms",
    "svg",
]
