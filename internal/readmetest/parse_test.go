// SPDX-License-Identifier: Apache-2.0

package readmetest

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// block is a fenced code block.
type block struct {
	line     int // of the opening fence
	language string
	text     string
	test     *directive // of the comment above it
	notRun   string     // why not
}

// directive is what "test:" asks for.
type directive struct {
	name    string
	timeout time.Duration
	want    []*regexp.Regexp
}

const defaultTimeout = 5 * time.Minute

var (
	fence   = regexp.MustCompile("^ {0,3}(```+|~~~+)\\s*([^\\s`]*)")
	comment = regexp.MustCompile(`^\s*<!--\s*(test|not run):\s*(.*?)\s*-->\s*$`)
	pair    = regexp.MustCompile(`^\s*([a-z]+)=("(?:[^"\\]|\\.)*"|\S+)`)
)

// parse finds the blocks of a Markdown text. A block that nobody says how to
// run is an error, and so is a comment that says it of no block.
func parse(markdown string) ([]block, error) {
	var (
		blocks []block
		errs   []error
		open   string // the fence that the current block began with
		above  []string
	)
	fail := func(line int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("line %d: %w", line, fmt.Errorf(format, args...)))
	}
	number := 0
	for line := range strings.Lines(markdown) {
		number++
		text := strings.TrimRight(line, "\r\n")
		m := fence.FindStringSubmatch(text)
		switch {
		case open == "" && m != nil:
			open = m[1]
			b := block{line: number, language: m[2]}
			if above != nil {
				var err error
				if b.test, b.notRun, err = parseComment(above[1], above[2]); err != nil {
					fail(number-1, "%w", err)
				}
			}
			above = nil
			blocks = append(blocks, b)
		case open != "" && m != nil && m[2] == "" && strings.HasPrefix(m[1], open):
			open = ""
		case open != "":
			blocks[len(blocks)-1].text += text + "\n"
		default:
			if above != nil {
				fail(number-1, "the comment is not directly above a block")
			}
			above = comment.FindStringSubmatch(text)
		}
	}
	if above != nil {
		fail(number, "the comment is not directly above a block")
	}
	if open != "" {
		fail(blocks[len(blocks)-1].line, "the block does not end")
	}
	for _, b := range blocks {
		if err := b.complain(); err != nil {
			fail(b.line, "%w", err)
		}
	}
	return blocks, errors.Join(errs...)
}

func (b block) complain() error {
	shell := b.language == "sh" || b.language == "bash"
	switch {
	case b.notRun != "" || b.language == "text" && b.test == nil:
		return nil
	case b.test != nil && !shell:
		return fmt.Errorf("only blocks of sh can be run, not of %q", b.language)
	case b.test != nil || b.language == "go":
		return nil
	case shell:
		return errors.New("say how the block is tested: <!-- test: NAME --> or <!-- not run: REASON --> on the line above it")
	default:
		return fmt.Errorf("a block of %q is not run: say why, with <!-- not run: REASON --> on the line above it", b.language)
	}
}

func parseComment(kind, text string) (test *directive, notRun string, err error) {
	if kind == "not run" {
		if text == "" {
			return nil, "", errors.New("not run: give a reason")
		}
		return nil, text, nil
	}
	name, rest, _ := strings.Cut(text, " ")
	if name == "" || strings.Contains(name, "=") {
		return nil, "", errors.New("test: give a name")
	}
	d := &directive{name: name}
	for strings.TrimSpace(rest) != "" {
		m := pair.FindStringSubmatch(rest)
		if m == nil {
			return nil, "", fmt.Errorf("test: %q is not key=value", rest)
		}
		rest = rest[len(m[0]):]
		value := m[2]
		if strings.HasPrefix(value, `"`) {
			if value, err = strconv.Unquote(value); err != nil {
				return nil, "", fmt.Errorf("test: %s: %w", m[0], err)
			}
		}
		switch m[1] {
		case "timeout":
			d.timeout, err = time.ParseDuration(value)
		case "want":
			var re *regexp.Regexp
			re, err = regexp.Compile(value)
			d.want = append(d.want, re)
		default:
			err = errors.New("unknown key")
		}
		if err != nil {
			return nil, "", fmt.Errorf("test: %s: %w", strings.TrimSpace(m[0]), err)
		}
	}
	return d, "", nil
}

// session is one shell.
type session struct {
	name    string
	script  string
	timeout time.Duration
	want    []*regexp.Regexp
}

// sessions joins the blocks of each name, in the order of the names' first
// blocks.
func sessions(blocks []block) []session {
	var list []session
	for _, b := range blocks {
		if b.test == nil {
			continue
		}
		i := slices.IndexFunc(list, func(s session) bool { return s.name == b.test.name })
		if i < 0 {
			i = len(list)
			list = append(list, session{name: b.test.name, timeout: defaultTimeout})
		}
		s := &list[i]
		s.script += fmt.Sprintf("# line %d\n%s", b.line, b.text)
		s.want = append(s.want, b.test.want...)
		if b.test.timeout != 0 {
			s.timeout = b.test.timeout
		}
	}
	return list
}

func TestParse(t *testing.T) {
	blocks, err := parse(strings.Join([]string{
		"# Title",
		"<!-- test: one timeout=90s want=\"a \\\"b\\\"\" want=c+ -->",
		"```sh",
		"echo 'a \"b\"'",
		"",
		"  echo c",
		"```",
		"text ```not a block```",
		"<!-- not run: needs a browser -->",
		"````text",
		"```sh",
		"inside",
		"```",
		"````",
		"<!-- other comments are free -->",
		"```go",
		"package main",
		"```",
		"  <!--test:one-->",
		"  ```bash",
		"echo d",
		"  ```",
		"<!-- test: two -->",
		"~~~sh",
		"true",
		"~~~",
		"```text",
		"what is printed",
		"```",
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	type plain struct {
		line                 int
		language, text, test string
		notRun               string
	}
	var got []plain
	for _, b := range blocks {
		p := plain{b.line, b.language, b.text, "", b.notRun}
		if b.test != nil {
			p.test = fmt.Sprintf("%s %s %v", b.test.name, b.test.timeout, b.test.want)
		}
		got = append(got, p)
	}
	want := []plain{
		{3, "sh", "echo 'a \"b\"'\n\n  echo c\n", `one 1m30s [a "b" c+]`, ""},
		{10, "text", "```sh\ninside\n```\n", "", "needs a browser"},
		{16, "go", "package main\n", "", ""},
		{20, "bash", "echo d\n", "one 0s []", ""},
		{24, "sh", "true\n", "two 0s []", ""},
		{27, "text", "what is printed\n", "", ""},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}

	list := sessions(blocks)
	if len(list) != 2 {
		t.Fatalf("%d sessions, want 2", len(list))
	}
	if s := list[0]; s.name != "one" || s.timeout != 90*time.Second || len(s.want) != 2 ||
		s.script != "# line 3\necho 'a \"b\"'\n\n  echo c\n# line 20\necho d\n" {
		t.Errorf("%+v", s)
	}
	if s := list[1]; s.name != "two" || s.timeout != defaultTimeout || s.script != "# line 24\ntrue\n" {
		t.Errorf("%+v", s)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, tc := range []struct{ markdown, want string }{
		{"```sh\ntrue\n```\n", "line 1: say how the block is tested"},
		{"text\n\n```\noutput\n```\n", `line 3: a block of "" is not run: say why`},
		{"<!-- test: x -->\n```text\n```\n", `line 2: only blocks of sh can be run, not of "text"`},
		{"```json\n{}\n```\n", `line 1: a block of "json" is not run: say why`},
		{"<!-- not run: -->\n```sh\n```\n", "line 1: not run: give a reason"},
		{"<!-- test: -->\n```sh\n```\n", "line 1: test: give a name"},
		{"<!-- test: timeout=5s -->\n```sh\n```\n", "line 1: test: give a name"},
		{"<!-- test: x timeout=5 -->\n```sh\n```\n", "line 1: test: timeout=5: time: missing unit"},
		{"<!-- test: x want=( -->\n```sh\n```\n", "line 1: test: want=(: error parsing regexp"},
		{"<!-- test: x what=y -->\n```sh\n```\n", "line 1: test: what=y: unknown key"},
		{"<!-- test: x y -->\n```sh\n```\n", `line 1: test: "y" is not key=value`},
		{"<!-- test: x -->\n```go\n```\n", `line 2: only blocks of sh can be run, not of "go"`},
		{"<!-- test: x -->\n\n```sh\n```\n", "line 1: the comment is not directly above a block"},
		{"<!-- test: x -->", "line 1: the comment is not directly above a block"},
		{"<!-- test: x -->\n```sh\ntrue\n", "line 2: the block does not end"},
	} {
		_, err := parse(tc.markdown)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v, want %q", tc.markdown, err, tc.want)
		}
	}
}
