// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// libraryFolders is where the dynamic linker looks without a cache.
var libraryFolders = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib",
}

// libraries are the files that a program is executed with: its interpreter and
// libraries, those of libraries included. There are none for a static one and for what
// is no ELF file.
func libraries(program string) ([]string, error) {
	var files []string
	seen := map[string]bool{}
	var visit func(file string) error
	visit = func(file string) error {
		names, interpreter, err := needs(file)
		if err != nil {
			return err
		}
		for _, name := range append(names, interpreter) {
			if name == "" || seen[name] {
				continue
			}
			seen[name] = true
			path, err := findLibrary(name)
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			files = append(files, path)
			if err := visit(path); err != nil {
				return err
			}
		}
		return nil
	}
	if err := visit(program); err != nil {
		return nil, fmt.Errorf("find libraries: %w", err)
	}
	return files, nil
}

// needs reads what an ELF file asks for.
func needs(file string) (names []string, interpreter string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	program, err := elf.NewFile(f)
	if errors.As(err, new(*elf.FormatError)) || errors.Is(err, io.EOF) {
		return nil, "", nil // a script
	}
	if err != nil {
		return nil, "", err
	}
	for _, p := range program.Progs {
		if p.Type == elf.PT_INTERP {
			text, err := io.ReadAll(p.Open())
			if err != nil {
				return nil, "", err
			}
			interpreter = strings.TrimRight(string(text), "\x00")
		}
	}
	names, err = program.ImportedLibraries()
	return names, interpreter, err
}

func findLibrary(name string) (path string, err error) {
	if filepath.IsAbs(name) {
		return name, nil
	}
	for _, folder := range libraryFolders {
		path := filepath.Join(folder, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s is in none of %s", name, strings.Join(libraryFolders, ", "))
}
