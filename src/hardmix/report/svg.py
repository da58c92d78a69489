"""SVG from a run's folder, made safe to embed in the page.

The file is not trusted: it is parsed, and only elements, attributes and styles on the lists below
are kept. No scripts, no event attributes, and no URLs except those inside the picture. Every id
gets a prefix, so that several pictures on a page do not clash.
"""

import re
import xml.etree.ElementTree as ET
from html import escape

MOST_BYTES = 2_000_000
DEEPEST = 60

ELEMENTS = """
svg g defs clipPath path rect circle ellipse line polyline polygon text tspan use image title desc
linearGradient radialGradient stop
"""
PAINT = """
fill fill-opacity fill-rule opacity stroke stroke-width stroke-opacity stroke-dasharray
stroke-dashoffset stroke-linecap stroke-linejoin stroke-miterlimit font-family font-size font-style
font-weight text-anchor dominant-baseline clip-path clip-rule stop-color stop-opacity visibility
"""
PLACE = """
x y x1 x2 y1 y2 cx cy r rx ry dx dy d points width height viewBox transform version offset
preserveAspectRatio clipPathUnits gradientUnits gradientTransform
"""
ELEMENT_NAMES = frozenset(ELEMENTS.split())
ATTRIBUTE_NAMES = frozenset(PAINT.split()) | frozenset(PLACE.split())
STYLE_NAMES = frozenset(PAINT.split()) | {"font", "image-rendering"}
SAFE_VALUE = re.compile(r"[\w\s.,:;#%+\-'\"()/*!?=°]*", re.ASCII)
INNER_URL = re.compile(r"url\(\s*['\"]?#([\w.\-]+)['\"]?\s*\)")
DATA_IMAGE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=\s]+")


def safe_svg(source: bytes, prefix: str, title: str) -> str:
    """Return safe markup of a picture, with a title; raises ValueError if it is not an SVG."""
    if len(source) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES // 1_000_000} MB")
    if b"<!ENTITY" in source:
        raise ValueError("it declares entities")
    try:
        root = ET.fromstring(source)
    except ET.ParseError as error:
        raise ValueError("it is not valid XML") from error
    if _local(root.tag) != "svg":
        raise ValueError("it is not an SVG picture")
    attributes = _attributes(root, prefix)
    box = attributes.get("viewBox") or _box_of(root)
    if box:
        attributes["viewBox"] = box
        attributes.pop("width", None)
        attributes.pop("height", None)
    attributes |= {"role": "img", "aria-label": title}
    inside = (escape(root.text or "", quote=False)) + "".join(_written(c, prefix, 1) for c in root)
    return f"<svg{_joined(attributes)}>{inside}</svg>"


def natural_width(svg: str) -> float:
    """Return the picture's width in pixels, from its viewBox; 0 if it has none."""
    found = re.search(r'viewBox="[\d.\-]+[ ,]+[\d.\-]+[ ,]+([\d.]+)', svg)
    return float(found[1]) if found else 0.0


def _written(element: ET.Element, prefix: str, depth: int) -> str:
    tail = escape(element.tail or "", quote=False)
    tag = _local(element.tag)
    if tag not in ELEMENT_NAMES or tag == "svg" or depth > DEEPEST:
        return tail
    inside = escape(element.text or "", quote=False)
    inside += "".join(_written(child, prefix, depth + 1) for child in element)
    return f"<{tag}{_joined(_attributes(element, prefix))}>{inside}</{tag}>{tail}"


def _attributes(element: ET.Element, prefix: str) -> dict[str, str]:
    kept = {}
    for full, value in element.attrib.items():
        name = _local(full)
        if name == "href":
            target = _href(_local(element.tag), value, prefix)
            if target is not None:
                kept["href"] = target
        elif name == "style":
            kept["style"] = _style(value, prefix)
        elif name == "id":
            kept["id"] = f"{prefix}{value}"
        elif name in ATTRIBUTE_NAMES:
            safe = _value(value, prefix)
            if safe is not None:
                kept[name] = safe
    return kept


def _href(tag: str, value: str, prefix: str) -> str | None:
    if tag == "use" and re.fullmatch(r"#[\w.\-]+", value):
        return f"#{prefix}{value[1:]}"
    if tag == "image" and DATA_IMAGE.fullmatch(value):
        return value
    return None


def _style(text: str, prefix: str) -> str:
    kept = []
    for declaration in text.split(";"):
        name, colon, value = declaration.partition(":")
        safe = _value(value.strip(), prefix)
        if colon and name.strip().lower() in STYLE_NAMES and safe is not None:
            kept.append(f"{name.strip().lower()}: {safe}")
    return "; ".join(kept)


def _value(value: str, prefix: str) -> str | None:
    """Return the value with its internal URLs prefixed; None if it has any other."""
    rest = INNER_URL.sub("", value)
    if "url" in rest.lower() or not SAFE_VALUE.fullmatch(rest):
        return None
    return INNER_URL.sub(lambda found: f"url(#{prefix}{found[1]})", value)


def _joined(attributes: dict[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())


def _local(tag: object) -> str:
    """Return a name without its namespace; comments and instructions have none."""
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


def _box_of(root: ET.Element) -> str | None:
    sizes = [re.fullmatch(r"([\d.]+)(px|pt)?", root.get(side, "")) for side in ("width", "height")]
    return f"0 0 {sizes[0][1]} {sizes[1][1]}" if sizes[0] and sizes[1] else None
