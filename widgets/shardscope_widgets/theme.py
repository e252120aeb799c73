"""Colours and the one stylesheet: JupyterLab's own variables, light and dark, one accent, one line weight."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COMPONENT_COLOURS: Mapping[str, str] = MappingProxyType({
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "logits": "#ee6677",
    "gather_buffers": "#aa3377",
    "communication": "#8b6b4a",
    "runtime": "#9aa3ad",
    "fragmentation": "#d5d9de",
})  # fmt: skip
"""One colour a component, in every chart, table and trace; Paul Tol's bright scheme, safe for colour-blind readers."""

RANK_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#8b6b4a", "#9aa3ad")
"""Lines of the first ranks; line dashes tell the others apart."""

RANK_DASHES = ("solid", "dash", "dot", "dashdot")

STYLE = """
.ss-root{--ss-line:var(--jp-border-color2,#e3e5e8);--ss-ink:var(--jp-ui-font-color1,#1d2329);
--ss-soft:var(--jp-ui-font-color2,#66707a);--ss-bg:var(--jp-layout-color0,#fff);--ss-panel:var(--jp-layout-color1,#fafafa);
--ss-accent:#1f6feb;--ss-on-accent:#fff;--ss-ok:#1a7f37;--ss-bad:#cf222e;
font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--ss-ink);background:var(--ss-bg)}
[data-jp-theme-light="false"] .ss-root{color-scheme:dark;--ss-accent:#6cb0ff;--ss-on-accent:#0d1117;--ss-ok:#4ac26b;--ss-bad:#ff7b72}
.ss-root .widget-label,.ss-root .widget-html-content,.ss-root input,.ss-root select,.ss-root button{font-size:13px}
.ss-root .widget-html-content{line-height:1.45;color:var(--ss-ink)}
.ss-root .widget-label{color:var(--ss-soft);text-align:left}
.ss-root .widget-checkbox label{color:var(--ss-ink)}
.ss-root button:focus:not(:focus-visible){outline:none!important}
.ss-root b,.ss-root th{font-weight:600}
.ss-root h2 .ss-hint{font-weight:400;margin-left:8px}
.ss-root h2{font-size:13px;font-weight:600;margin:16px 0 6px;color:var(--ss-ink)}
.ss-root input,.ss-root select,.ss-root button{font-family:inherit}
.ss-root select{appearance:auto;background-image:none!important}
.ss-root input[type=text],.ss-root input[type=number],.ss-root select{color:var(--ss-ink);background-color:var(--ss-bg);
border:1px solid var(--ss-line);border-radius:5px;font-variant-numeric:tabular-nums}
.ss-root input:focus-visible,.ss-root select:focus-visible,.ss-root button:focus-visible,.ss-root summary:focus-visible{
outline:2px solid var(--ss-accent);outline-offset:1px}
.ss-studio{border:1px solid var(--ss-line);border-radius:8px;overflow:hidden;max-width:1280px}
.ss-head{padding:10px 16px;border-bottom:1px solid var(--ss-line);min-height:66px}
.ss-head .what{color:var(--ss-soft)}.ss-head .what b{color:var(--ss-ink);font-size:15px}
.ss-verdict{font-size:15px;font-weight:600;min-height:22px}
.ss-fits{color:var(--ss-ok)}.ss-lacks,.ss-error{color:var(--ss-bad)}
.ss-body{display:grid!important;grid-template-columns:312px minmax(0,1fr);align-items:stretch}
.ss-side{border-right:1px solid var(--ss-line);background:var(--ss-panel);padding:12px}
.ss-side>*{margin:0}
.ss-group{border-bottom:1px solid var(--ss-line);padding:0 0 12px;margin:0 0 12px!important}
.ss-group:last-child{border-bottom:0;margin-bottom:0!important}
.ss-group h3{font-size:13px;font-weight:600;margin:0 0 4px;color:var(--ss-ink)}
.ss-hint,.ss-root .ss-hint .widget-html-content{color:var(--ss-soft);font-size:12px;line-height:1.45}
.ss-error,.ss-root .ss-error .widget-html-content{color:var(--ss-bad);font-size:12px;line-height:1.45}
.ss-main{padding:0 16px 16px;min-width:0}
.ss-root .widget-box,.ss-root .js-plotly-plot,.ss-root .plotly{min-width:0;max-width:100%}
.ss-tabs{border-bottom:1px solid var(--ss-line);margin:0 -16px 14px;padding:0 16px}
.ss-tabs .widget-toggle-button,.ss-tabs button{background:none;border:0;border-bottom:2px solid transparent;border-radius:0;
box-shadow:none!important;color:var(--ss-soft);width:auto;min-width:0;height:40px;line-height:38px;padding:0 2px;margin:0 16px 0 0;font-size:13px}
.ss-tabs button.mod-active{background:none;color:var(--ss-ink);border-bottom-color:var(--ss-accent);font-weight:600}
.ss-seg{flex-wrap:nowrap}.ss-seg .widget-toggle-buttons{overflow:visible}
.ss-seg .jupyter-button,.ss-seg button{background:var(--ss-bg);color:var(--ss-soft);border:1px solid var(--ss-line);box-shadow:none!important;
width:auto;min-width:0;flex:1 1 auto;margin:0 0 0 -1px;padding:0 8px;height:28px;line-height:26px;border-radius:0;font-size:12.5px}
.ss-seg button:first-child{border-radius:5px 0 0 5px;margin-left:0}.ss-seg button:last-child{border-radius:0 5px 5px 0}
.ss-seg button.mod-active{background:var(--ss-accent);color:var(--ss-on-accent);border-color:var(--ss-accent)}
.ss-button button,button.ss-button{font-weight:600;border:0;border-radius:6px;background:var(--ss-accent);color:var(--ss-on-accent);
height:34px;line-height:34px;padding:0 14px;width:auto;box-shadow:none!important}
button.ss-button:disabled{opacity:.5}
button.ss-ghost{background:none;border:1px solid var(--ss-line);color:var(--ss-ink);font-weight:500;border-radius:6px;height:34px;
line-height:32px;padding:0 14px;width:auto;box-shadow:none!important}
button.ss-link{background:none;border:0;color:var(--ss-accent);padding:0;height:auto;line-height:1.45;width:auto;box-shadow:none!important;font-size:12px}
.ss-note{border-left:3px solid var(--ss-accent);background:var(--ss-panel);padding:6px 10px;margin:0 0 12px}
.ss-legend{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 28px;margin:8px 0 0}
.ss-legend details{border-bottom:1px solid var(--ss-line)}
.ss-legend summary{display:grid;grid-template-columns:14px minmax(0,1fr) 84px 46px;gap:8px;padding:4px 0;align-items:center;cursor:pointer;list-style:none}
.ss-legend summary::-webkit-details-marker{display:none}
.ss-legend i{width:12px;height:12px;border-radius:2px}
.ss-legend em{font-style:normal;text-align:right;font-variant-numeric:tabular-nums}.ss-legend em+em{color:var(--ss-soft)}
.ss-legend p{margin:0 0 6px 22px;color:var(--ss-soft);font-size:12px;overflow-wrap:anywhere}
.ss-swatch{display:inline-block;width:14px;height:3px;vertical-align:middle;margin-right:6px}
.ss-table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.ss-table th,.ss-table td{border-bottom:1px solid var(--ss-line);padding:3px 12px 3px 0;text-align:right;background:none!important;font-size:12.5px}
.ss-table th:first-child,.ss-table td:first-child{text-align:left}
.ss-table caption{text-align:left;color:var(--ss-soft);padding:4px 0;white-space:nowrap}
.ss-root pre.ss-log{margin:0;padding:8px 10px;height:200px;overflow:auto;background:var(--ss-panel);border:1px solid var(--ss-line);border-radius:5px;
font:12px/1.45 var(--jp-code-font-family,monospace);white-space:pre-wrap;overflow-wrap:anywhere;color:var(--ss-ink)}
.ss-root .js-plotly-plot text{fill:var(--ss-soft)!important;font-family:var(--jp-ui-font-family,system-ui,sans-serif)!important}
.ss-root .js-plotly-plot .annotation-text{fill:var(--ss-ink)!important}
.ss-root .js-plotly-plot .gridlayer path{stroke:var(--ss-line)!important}
.ss-root .js-plotly-plot .shapelayer path{stroke:var(--ss-ink)!important}
.ss-root .js-plotly-plot .hoverlayer text{fill:#fff!important}
.ss-root .js-plotly-plot .hoverlayer rect,.ss-root .js-plotly-plot .hoverlayer path{fill:#24292f!important;stroke:#24292f!important}
.ss-root .jp-OutputPlaceholder{display:none}
@media (max-width:900px){.ss-body{grid-template-columns:minmax(0,1fr)}.ss-side{border-right:0;border-bottom:1px solid var(--ss-line)}}
@media (max-width:560px){.ss-legend{grid-template-columns:minmax(0,1fr)}}
"""
"""Everything is under ``.ss-root``, so that nothing outside of Shardscope's own widgets changes."""
