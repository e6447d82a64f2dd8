// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

const (
	// maxFDName is how long the name of a descriptor may be, in octets (systemd,
	// fdname_is_valid).
	maxFDName = 255
	// storePrefix tells entries of StoreName from names of units and of others.
	storePrefix = "instar/"

	hex = "0123456789abcdef"
)

// checkFDName refuses names that the manager does not take: it would store the
// descriptor under the name "stored".
func checkFDName(name string) error {
	if name == "" {
		return errors.New("name a descriptor: the name is empty")
	}
	if len(name) > maxFDName {
		return fmt.Errorf("name a descriptor %.20q...: %d octets, at most %d are possible", name, len(name), maxFDName)
	}
	for i := range len(name) {
		if c := name[i]; c < ' ' || c > '~' || c == ':' {
			return fmt.Errorf("name a descriptor %q: %q is not allowed, only printable ASCII without a colon", name, c)
		}
	}
	return nil
}

func storeLines(name string) ([]string, error) {
	if err := checkFDName(name); err != nil {
		return nil, err
	}
	return []string{"FDSTORE=1", "FDNAME=" + name}, nil
}

// StoreName makes the name of an entry in the manager's store. Different roles
// and generations have different names. The role is any text but the empty one;
// octets that a name cannot have take three octets each, and the name as a
// whole has at most 255. A generation is 0 or more.
func StoreName(role string, generation int) (string, error) {
	wrong := func(why string) (string, error) {
		return "", fmt.Errorf("make the store's name of role %q, generation %d: %s", role, generation, why)
	}
	if role == "" {
		return wrong("the role is empty")
	}
	if generation < 0 {
		return wrong("a generation is 0 or more")
	}
	var b strings.Builder
	b.WriteString(storePrefix)
	b.WriteString(strconv.Itoa(generation))
	b.WriteByte('/')
	for i := range len(role) {
		if c := role[i]; escaped(c) {
			b.Write([]byte{'%', hex[c>>4], hex[c&0xf]})
		} else {
			b.WriteByte(c)
		}
	}
	if b.Len() > maxFDName {
		return wrong(fmt.Sprintf("it would have %d octets, at most %d are possible; shorten the role", b.Len(), maxFDName))
	}
	return b.String(), nil
}

// escaped reports whether StoreName writes the octet as %xx. A blank, quotes and
// the backslash could be in a name, but other readers of LISTEN_FDNAMES take them
// for syntax.
func escaped(c byte) bool {
	return c <= ' ' || c > '~' || strings.IndexByte(`:%"'\`, c) >= 0
}

// ParseStoreName returns the role and the generation that StoreName made the name
// of. ok is false for all other names.
func ParseStoreName(name string) (role string, generation int, ok bool) {
	if len(name) > maxFDName {
		return "", 0, false
	}
	rest, ok := strings.CutPrefix(name, storePrefix)
	if !ok {
		return "", 0, false
	}
	number, text, ok := strings.Cut(rest, "/")
	if !ok || text == "" {
		return "", 0, false
	}
	generation, err := strconv.Atoi(number)
	if err != nil || generation < 0 || strconv.Itoa(generation) != number {
		return "", 0, false
	}
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case c == '%':
			if i+2 >= len(text) {
				return "", 0, false
			}
			hi, lo := strings.IndexByte(hex, text[i+1]), strings.IndexByte(hex, text[i+2])
			if hi < 0 || lo < 0 || !escaped(byte(hi<<4|lo)) {
				return "", 0, false
			}
			b.WriteByte(byte(hi<<4 | lo))
			i += 2
		case escaped(c):
			return "", 0, false
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), generation, true
}

// Stored is a descriptor that came back from the manager's store.
type Stored struct {
	Descriptor
	Role       string
	Generation int
}

// Latest sorts inherited descriptors. For each role, latest has those of its
// newest generation, several if several were stored. stale has those of older
// generations, to be closed, and to be removed from the store by their names.
// others has what StoreName did not name: sockets of units, mostly. All three
// keep the order, and none is closed.
func Latest(inherited []Descriptor) (latest, stale []Stored, others []Descriptor) {
	newest := map[string]int{}
	var all []Stored
	for _, d := range inherited {
		role, generation, ok := ParseStoreName(d.Name)
		if !ok {
			others = append(others, d)
			continue
		}
		all = append(all, Stored{d, role, generation})
		newest[role] = max(newest[role], generation)
	}
	for _, s := range all {
		if s.Generation == newest[s.Role] {
			latest = append(latest, s)
		} else {
			stale = append(stale, s)
		}
	}
	return latest, stale, others
}
