//! A report as one HTML page that needs nothing beside it.

use std::fmt::Write;

/// Title, parameters, tables and plots, in the order in which they are added.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    title: String,
    parameters: Vec<(String, String)>,
    parts: Vec<Part>,
}

#[derive(Clone, PartialEq, Debug)]
enum Part {
    Heading(String),
    Note(String),
    Table(Table),
    Plot(String),
}

/// A table; its first column holds names, the others figures.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    /// What stands above the columns.
    pub head: Vec<String>,
    /// The rows, cell by cell.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table under this head.
    pub fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) -> &mut Self {
        self.rows.push(cells.into_iter().map(Into::into).collect());
        self
    }
}

impl Report {
    /// An empty report.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), ..Self::default() }
    }

    /// Adds what the run was made with; all of them stand at the top.
    pub fn parameter(&mut self, name: impl Into<String>, value: impl ToString) -> &mut Self {
        self.parameters.push((name.into(), value.to_string()));
        self
    }

    /// Begins a section.
    pub fn heading(&mut self, text: impl Into<String>) -> &mut Self {
        self.parts.push(Part::Heading(text.into()));
        self
    }

    /// Adds a paragraph.
    pub fn note(&mut self, text: impl Into<String>) -> &mut Self {
        self.parts.push(Part::Note(text.into()));
        self
    }

    /// Adds a table.
    pub fn table(&mut self, table: Table) -> &mut Self {
        self.parts.push(Part::Table(table));
        self
    }

    /// Adds a plot of [`plot`](super::plot), which is put on the page as it is.
    pub fn plot(&mut self, svg: String) -> &mut Self {
        self.parts.push(Part::Plot(svg));
        self
    }

    /// The page.
    pub fn html(&self) -> String {
        let title = escaped(&self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        );
        // Writing to a string cannot fail.
        if !self.parameters.is_empty() {
            page.push_str("<dl>");
            for (name, value) in &self.parameters {
                let _ = write!(page, "<dt>{}</dt><dd>{}</dd>", escaped(name), escaped(value));
            }
            page.push_str("</dl>\n");
        }
        for part in &self.parts {
            let _ = match part {
                Part::Heading(text) => writeln!(page, "<h2>{}</h2>", escaped(text)),
                Part::Note(text) => writeln!(page, "<p>{}</p>", escaped(text)),
                Part::Table(table) => writeln!(page, "{}", table_html(table)),
                Part::Plot(svg) => writeln!(page, "<figure>{svg}</figure>"),
            };
        }
        page.push_str("</body></html>\n");
        page
    }
}

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1.2em}dt{color:#666}dd{margin:0}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th,td{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}\
figure{margin:1em 0;overflow-x:auto}svg{max-width:100%;height:auto}";

fn table_html(table: &Table) -> String {
    let row = |cells: &[String], tag: &str| {
        let cells = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        format!("<tr>{}</tr>", cells.collect::<String>())
    };
    let rows: String = table.rows.iter().map(|cells| row(cells, "td")).collect();
    format!("<table><thead>{}</thead><tbody>{rows}</tbody></table>", row(&table.head, "th"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_needs_nothing_beside_it_and_shows_text_as_text() {
        let mut report = Report::new("Select <&>");
        let mut table = Table::new(["rate", "p99"]);
        table.row(["100 <b>", "5 ms"]);
        report.parameter("url", "http://x/?a=1&b=2").heading("Rates").note("2 < 3").table(table);
        let page = report.plot("<svg></svg>".to_owned()).html();
        for wanted in
            ["<h1>Select &lt;&amp;&gt;</h1>", "a=1&amp;b=2", "<td>100 &lt;b&gt;</td>", "<svg></svg>"]
        {
            assert!(page.contains(wanted), "{wanted} is not in {page}");
        }
        for outside in ["<link", "<script", "src=", "@import"] {
            assert!(!page.contains(outside), "{outside} is in {page}");
        }
    }
}
