// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"
)

// Parse reads a program as tools write it, in decimal numbers: the number of
// instructions, and for each its code, jt, jf and k. Two forms are known:
//
//   - of tcpdump -ddd: each on a line of its own;
//   - of nfbpf_compile, and of the match "bpf" of iptables (xt_bpf): on one line,
//     with a comma after each.
//
// Blank lines and blanks around numbers do not matter. An error names the line,
// in the second form the instruction. Whether the program is a good one is for
// [Check] and [Translate] to say.
func Parse(text string) ([]bpf.RawInstruction, error) {
	parts := split(text)
	if len(parts) == 0 {
		return nil, fmt.Errorf("parse classic BPF: the text is empty: give the output of tcpdump -ddd or nfbpf_compile")
	}
	first := parts[0]
	count, err := strconv.ParseUint(first.text, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("parse classic BPF: %s: %s is not the number of instructions: give the whole output of tcpdump -ddd or nfbpf_compile", first.place, quote(first.text))
	}
	if count > MaxInstructions {
		return nil, fmt.Errorf("parse classic BPF: %s: %d instructions: at most %d are allowed", first.place, count, MaxInstructions)
	}
	parts = parts[1:]
	if uint64(len(parts)) < count {
		return nil, fmt.Errorf("parse classic BPF: %s: there are %d instructions, not %d: the text was cut, give all of it", first.place, len(parts), count)
	}
	if uint64(len(parts)) > count {
		return nil, fmt.Errorf("parse classic BPF: %s: this is behind the last of %d instructions: take it away, or correct the number", parts[count].place, count)
	}
	program := make([]bpf.RawInstruction, count)
	for i, p := range parts {
		if program[i], err = parseInstruction(p.text); err != nil {
			return nil, fmt.Errorf("parse classic BPF: %s: %w", p.place, err)
		}
	}
	return program, nil
}

// part is a piece of the text and where it is from.
type part struct{ text, place string }

// split cuts a text into the count and the instructions.
func split(text string) []part {
	var parts []part
	lines := strings.Split(text, "\n")
	for n, line := range lines {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		pieces := strings.Split(line, ",")
		if len(pieces) == 1 {
			parts = append(parts, part{line, fmt.Sprintf("line %d", n+1)})
			continue
		}
		if pieces[len(pieces)-1] == "" {
			pieces = pieces[:len(pieces)-1]
		}
		for _, piece := range pieces {
			place := fmt.Sprintf("line %d", n+1)
			if len(parts) > 0 {
				place += fmt.Sprintf(", instruction %d", len(parts)-1)
			}
			parts = append(parts, part{strings.TrimSpace(piece), place})
		}
	}
	return parts
}

func parseInstruction(text string) (ins bpf.RawInstruction, err error) {
	fields := strings.Fields(text)
	if len(fields) != 4 {
		return ins, fmt.Errorf("%s has %d numbers: an instruction has four, code jt jf k", quote(text), len(fields))
	}
	var numbers [4]uint64
	for i, bits := range []int{16, 8, 8, 32} {
		numbers[i], err = strconv.ParseUint(fields[i], 10, bits)
		if err != nil {
			name := []string{"code", "jt", "jf", "k"}[i]
			return ins, fmt.Errorf("%s of %s is not a decimal number up to %d: write it so", name, quote(text), uint64(1)<<bits-1)
		}
	}
	return bpf.RawInstruction{
		Op: uint16(numbers[0]),
		Jt: uint8(numbers[1]),
		Jf: uint8(numbers[2]),
		K:  uint32(numbers[3]),
	}, nil
}

// quote quotes what a message cites, and cuts it where it is long.
func quote(s string) string {
	const most = 40
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.Quote(s)
}

// Format writes a program as tcpdump -ddd does.
func Format(program []bpf.RawInstruction) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d\n", len(program))
	for _, ins := range program {
		fmt.Fprintf(&b, "%d %d %d %d\n", ins.Op, ins.Jt, ins.Jf, ins.K)
	}
	return b.String()
}
