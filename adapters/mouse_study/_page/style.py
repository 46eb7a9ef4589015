"""The style of the page, which refers to nothing outside of it."""

#: So many frameworks have a colour of their own.
COLOURS = 6

STYLE = """
:root { color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --ink: #1c2430; --dim: #5d6b7c; --line: #dfe4ea; --grid: #e4e9ef;
  --warn: #8a5200; --warn-back: #fff4de; --good: #216b40; --good-back: #e7f5ec;
  --c0: #d1495b; --c1: #2e6fb7; --c2: #3a8a4f; --c3: #8d5bb5; --c4: #b9770e; --c5: #50707f;
  --wait: #d98c2b; --first: #8a7fb8; --compute: #3b7fb0; --rest: #b4bec9; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --card: #1b2128; --ink: #e5eaf0; --dim: #9aa7b5; --line: #2e3742; --grid: #2a323c;
  --warn: #f3c069; --warn-back: #33290f; --good: #84d3a2; --good-back: #14301f;
  --c0: #f2808c; --c1: #79b0ee; --c2: #7cc98d; --c3: #c39ae6; --c4: #edb458; --c5: #9dbccb;
  --wait: #e6a653; --first: #a99ddb; --compute: #67a9da; --rest: #4b5764; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main, header, footer { max-width: 1180px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 28px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 38px 0 10px; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 22px 0 8px; font-weight: 600; overflow-wrap: anywhere; }
.card h3 { margin: 0 0 6px; }
p { margin: 0 0 10px; max-width: 80ch; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .small { font-size: .88rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; padding: 0; list-style: none; }
.figures li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  flex: 1 1 auto; min-width: 96px; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--dim); font-size: .85rem; }
.said { border-radius: 10px; padding: 10px 14px; margin: 14px 0 0; max-width: none; font-weight: 600;
  font-size: 1.05rem; }
.good { background: var(--good-back); border-left: 4px solid var(--good); }
.warning { background: var(--warn-back); border-left: 4px solid var(--warn); }
.yes { color: var(--good); } .no { color: var(--warn); }
.pairs { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 0 14px; margin: 0;
  list-style: none; max-height: 80vh; overflow-y: auto; }
.pairs li { padding: 10px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.pairs li:last-child { border-bottom: 0; } .pairs p { margin: 2px 0 0; max-width: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; padding: 0; list-style: none;
  font-size: .88rem; }
.legend li { overflow-wrap: anywhere; min-width: 0; }
.legend i { display: inline-block; width: 16px; height: 10px; border-radius: 3px; margin-right: 6px; }
.cards { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); margin: 0 0 12px; }
.cards.one { grid-template-columns: minmax(0, 640px); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px; min-width: 0; }
.card p { font-size: .85rem; color: var(--dim); margin: 6px 0 0; }
svg { display: block; width: 100%; height: auto;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); margin: 0 0 12px; max-height: 80vh; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
thead th { color: var(--dim); font-weight: 600; position: sticky; top: 0; background: var(--card); }
.text { text-align: left; max-width: 44ch; overflow-wrap: anywhere; }
td.text { min-width: 9ch; } td.long { white-space: normal; min-width: 30ch; }
.bars { font-size: .88rem; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 14px; margin: 0 0 12px; display: grid; gap: 4px 12px; grid-template-columns: minmax(0, 1fr) max-content; }
.bars span { overflow-wrap: anywhere; }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; grid-column: 1 / -1; margin: 0 0 8px; }
.bar i { display: block; height: 100%; }
.wait { background: var(--wait); } .first { background: var(--first); } .compute { background: var(--compute); }
.rest { background: var(--rest); }
footer { margin-top: 36px; padding: 16px; color: var(--dim); font-size: .85rem; }
@media (max-width: 560px) { h2 { margin-top: 30px; } }
"""
