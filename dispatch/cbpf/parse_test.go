// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/bpf"

	"instar/internal/testutil"
)

func TestParse(t *testing.T) {
	udp := []bpf.RawInstruction{
		op(0x30, 9), jmp(0x15, 17, 0, 1), op(0x06, 0xffffffff), op(0x06, 0),
	}
	for name, text := range map[string]string{
		"tcpdump":         "4\n48 0 0 9\n21 0 1 17\n6 0 0 4294967295\n6 0 0 0\n",
		"no last newline": "4\n48 0 0 9\n21 0 1 17\n6 0 0 4294967295\n6 0 0 0",
		"CR LF":           "4\r\n48 0 0 9\r\n21 0 1 17\r\n6 0 0 4294967295\r\n6 0 0 0\r\n",
		"blank lines":     "\n4\n\n48 0 0 9\n 21\t0 1  17\n6 0 0 4294967295\n6 0 0 0\n\n",
		"nfbpf_compile":   "4,48 0 0 9,21 0 1 17,6 0 0 4294967295,6 0 0 0,",
		"xt_bpf":          "4,48 0 0 9,21 0 1 17,6 0 0 4294967295,6 0 0 0",
		"with newline":    "4,48 0 0 9,21 0 1 17,6 0 0 4294967295,6 0 0 0,\n",
	} {
		if got, err := Parse(text); err != nil || !slices.Equal(got, udp) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if got := Format(udp); got != "4\n48 0 0 9\n21 0 1 17\n6 0 0 4294967295\n6 0 0 0\n" {
		t.Errorf("format: %q", got)
	}
}

func TestParseErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                             "the text is empty: give the output of tcpdump -ddd",
		" \n\n":                        "the text is empty",
		"ip and udp":                   `line 1: "ip and udp" is not the number of instructions: give the whole output`,
		"(000) ret #0":                 "line 1: \"(000) ret #0\" is not the number",
		"{ 0x6, 0, 0, 0x0 },":          `line 1: "{ 0x6" is not the number`,
		"-1\n":                         `line 1: "-1" is not the number`,
		"4097\n":                       "line 1: 4097 instructions: at most 4096",
		"2\n6 0 0 0\n":                 "line 1: there are 1 instructions, not 2: the text was cut",
		"2,6 0 0 0,":                   "line 1: there are 1 instructions, not 2: the text was cut",
		"1\n6 0 0 0\n6 0 0 0\n":        "line 3: this is behind the last of 1 instructions",
		"1,6 0 0 0,6 0 0 0":            "line 1, instruction 1: this is behind the last of 1",
		"1\n6 0 0\n":                   `line 2: "6 0 0" has 3 numbers: an instruction has four`,
		"\n\n1\n\n6 0 0 0 0\n":         `line 5: "6 0 0 0 0" has 5 numbers`,
		"1\n65536 0 0 0\n":             `line 2: code of "65536 0 0 0" is not a decimal number up to 65535`,
		"1\n6 256 0 0\n":               `line 2: jt of "6 256 0 0" is not a decimal number up to 255`,
		"1\n6 0 x 0\n":                 `line 2: jf of "6 0 x 0" is not a decimal number up to 255`,
		"1\n6 0 0 4294967296\n":        `line 2: k of "6 0 0 4294967296" is not a decimal number up to 4294967295`,
		"1\n6 0 0 0xff\n":              "line 2: k of",
		"2,6 0 0 0,6 0 0 -1":           "line 1, instruction 1: k of",
		"1," + strings.Repeat("6", 99): `line 1, instruction 0: "6666666666666666666666666666666666666666..." has 1 numbers`,
	} {
		got, err := Parse(text)
		if err == nil || got != nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "parse classic BPF: ") {
			t.Errorf("%q: %v, %v; want %q", text, got, err, want)
		}
	}
}

// TestParseTcpdump compiles expressions with tcpdump itself.
func TestParseTcpdump(t *testing.T) {
	tcpdump := testutil.NeedCommand(t, "tcpdump", "tcpdump")
	for _, expression := range []string{
		"udp", "ip and udp port 443", "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
		"ip6 and ip6[6] = 17", "ether host 00:11:22:33:44:55 or arp",
		"ip[2:2] - ((ip[0]&0xf)<<2) > 100", "greater 100 and not host 192.0.2.1",
		"ip protochain 17", "inbound",
	} {
		out, err := exec.Command(tcpdump, "-y", "EN10MB", "-ddd", expression).Output()
		if err != nil {
			t.Fatalf("%s: %v", expression, err)
		}
		program, err := Parse(string(out))
		if err != nil {
			t.Errorf("%s: %v", expression, err)
			continue
		}
		if Format(program) != string(out) {
			t.Errorf("%s: %q is %q", expression, out, Format(program))
		}
		if expression == "ip protochain 17" {
			continue // a loop: for libpcap's own machine only
		}
		if _, err := Translate(program, Options{}); err != nil {
			t.Errorf("%s: %v", expression, err)
		}
	}
}
